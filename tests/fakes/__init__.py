"""Plug-ins for tests, named by dotted names such as `fakes.table_runtime`."""
