"""What a report says of a plan beyond its own numbers, by closed forms and the bundled runs."""
