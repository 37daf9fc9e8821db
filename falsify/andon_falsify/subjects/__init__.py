"""Our trainer as a subject: it runs a case and returns a trace of what was observed from outside."""
