-- The oldest schema whose programs can use these tables. A migration only adds what older programs can leave alone; one that they
-- cannot work with raises this number, in its first statement.
CREATE TABLE schema_compatibility (
    name       TEXT   NOT NULL PRIMARY KEY,
    min_schema BIGINT NOT NULL
);
INSERT INTO schema_compatibility (name, min_schema) VALUES ('current', 50);
