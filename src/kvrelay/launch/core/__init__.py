"""The launcher's decisions: configuration, plan, compatibility."""
