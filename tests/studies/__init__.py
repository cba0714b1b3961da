"""Programs that measure something and write a recorded file; nothing here is a test."""
