"""From a plan to an engine and its manifest: builds, in processes of their own, and what can be said of them later."""
