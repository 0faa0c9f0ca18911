"""`kcache report`: one HTML page about a cache, for people who would rather look than read."""
