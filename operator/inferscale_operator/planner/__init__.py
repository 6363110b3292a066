"""What to do next: from (resource, observed, time) to actions and status; pure."""
