"""The simulator: the controller's own rounds on a virtual clock."""
