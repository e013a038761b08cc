"""Learning how fast jobs go from what they report."""
