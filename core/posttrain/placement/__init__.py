"""Where roles run and how a batch is cut: pure rules, checked before anything starts."""
