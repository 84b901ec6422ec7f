"""One plan played out exactly: every allocation, launch and wait in order."""
