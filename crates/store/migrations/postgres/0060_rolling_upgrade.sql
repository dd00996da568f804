-- The oldest schema whose programs can use these tables. A migration only adds what older programs can leave alone; one that they
-- cannot work with raises this number, in its first statement.
CREATE TABLE schema_compatibility (
    name       TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    min_schema BIGINT           NOT NULL
);
INSERT INTO schema_compatibility (name, min_schema) VALUES ('current', 50);

-- The newest schema that the server's program knows, and how far its clock is ahead of the database's, in milliseconds.
ALTER TABLE servers ADD COLUMN schema_version BIGINT NOT NULL DEFAULT 50;
ALTER TABLE servers ADD COLUMN clock_ahead BIGINT;

-- Refuses to raise the number while servers run that would be too old then.
CREATE FUNCTION refuse_while_older_servers_run() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    running TEXT;
BEGIN
    -- Whoever joins at the same time waits here, and then finds the new number.
    LOCK TABLE servers IN SHARE ROW EXCLUSIVE MODE;
    -- A server that is not heard of loses its lease, so that it writes nothing when it comes back.
    DELETE FROM server_leases USING servers
        WHERE servers.server_id = server_leases.server_id AND servers.schema_version < NEW.min_schema
            AND servers.last_seen < (EXTRACT(EPOCH FROM clock_timestamp()) * 1000)::bigint - 8000;
    SELECT string_agg(servers.version || ' at ' || servers.address, ', ' ORDER BY servers.server_id) INTO running
        FROM servers JOIN server_leases ON server_leases.server_id = servers.server_id
        WHERE servers.schema_version < NEW.min_schema;
    IF running IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'OU001', MESSAGE = running;
    END IF;
    RETURN NEW;
END;
$$;

CREATE TRIGGER older_servers_are_not_broken BEFORE UPDATE ON schema_compatibility
    FOR EACH ROW EXECUTE FUNCTION refuse_while_older_servers_run();
