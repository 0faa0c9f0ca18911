"""From findings to tables, charts and pages."""
