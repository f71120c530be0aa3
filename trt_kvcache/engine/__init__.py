"""Builds engines and manifests from plans, in child processes; inspects engines; diagnoses machines."""
