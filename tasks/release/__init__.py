"""From a report to a registered version: gate, champion, registration."""
