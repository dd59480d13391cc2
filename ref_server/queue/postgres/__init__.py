"""The store for several servers behind one queue."""
