-- The images a session's sandboxes were started from: a JSON object of names and the digests they stood for.
ALTER TABLE sessions ADD COLUMN images TEXT COLLATE "C";
