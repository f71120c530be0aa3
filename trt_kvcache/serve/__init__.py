"""Serves one session to many clients: `core` steps the session, `service` speaks HTTP, `server` runs the process."""
