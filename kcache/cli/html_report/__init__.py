"""The HTML page that `kcache report` writes."""
