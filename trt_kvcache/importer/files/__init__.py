"""Model files and what lies beside them: read, checked, written."""
