"""The report that people forward: sections of text, tables and charts, as one HTML page and as Markdown."""
