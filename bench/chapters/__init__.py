"""One module per chapter: what is measured, and what it is compared with."""
