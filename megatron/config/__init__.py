"""Run configuration: schema, derived quantities and identity hash."""
