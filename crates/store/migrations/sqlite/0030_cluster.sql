-- Only PostgreSQL is shared by several servers. The versions of both databases are the same, so that a backup of one fits the other.
SELECT 1;
