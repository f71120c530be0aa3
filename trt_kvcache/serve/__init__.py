"""Serving: one session for many clients. `core` steps it, `app` speaks HTTP, `server` runs the process."""
