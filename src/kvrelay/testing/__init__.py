"""Public fakes and small models for tests and demos."""
