"""Watch, queue and reconcile: the operator's loop."""
