//! Whether this program can use the tables of a database that a newer one has migrated.
//!
//! Migrations only add: tables, indexes, and columns that a statement may leave out. So a program works on tables that are newer
//! than it is, beside servers that made them. A migration with which older programs cannot work says so: its first statement
//! raises `min_schema` in the table `schema_compatibility` to its own version.

use sqlx::migrate::Migrator;

/// The smallest schema whose programs can use the tables. No row before schema 60.
pub(crate) const READ_MIN_SCHEMA: &str = "SELECT min_schema FROM schema_compatibility WHERE name = 'current'";

/// What a database says of its schema.
#[derive(Debug, Default)]
pub(crate) struct FoundSchema {
    /// The versions of the migrations that were applied.
    pub(crate) applied: Vec<i64>,
    /// The oldest schema whose programs can use it; none if it does not say.
    pub(crate) min_schema: Option<i64>,
}

/// What a program can do with a database.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SchemaFit {
    /// It knows all its migrations; some may be missing.
    Known,
    /// The database is newer, and this program can use it as it is.
    Newer,
    /// The database is newer, of this version, and this program cannot use it.
    TooNew(i64),
    /// A migration was applied, with this version, that no version of this program had.
    Foreign(i64),
}

impl FoundSchema {
    /// What a program with these migrations can do with it.
    pub(crate) fn fit(&self, migrations: &Migrator) -> SchemaFit {
        let newest = newest_version(migrations);
        let mut unknown = self
            .applied
            .iter()
            .filter(|version| !migrations.version_exists(**version));
        if let Some(foreign) = unknown.clone().find(|version| **version < newest) {
            return SchemaFit::Foreign(*foreign);
        }
        match (unknown.next_back(), self.min_schema) {
            (None, _) => SchemaFit::Known,
            (Some(_), Some(oldest)) if oldest <= newest => SchemaFit::Newer,
            (Some(_), _) => SchemaFit::TooNew(self.applied.iter().copied().max().unwrap_or(newest)),
        }
    }
}

/// The version of the newest of these migrations.
pub(crate) fn newest_version(migrations: &Migrator) -> i64 {
    let versions = migrations.iter().map(|migration| migration.version);
    versions.max().unwrap_or(0)
}

/// The same migrations, for a database that may have newer ones besides: whether it fits is checked apart from them.
pub(crate) fn beside_newer(migrations: &Migrator) -> Migrator {
    Migrator {
        migrations: migrations.migrations.clone(),
        ignore_missing: true,
        ..Migrator::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static SQLITE: Migrator = sqlx::migrate!("./migrations/sqlite");
    static POSTGRES: Migrator = sqlx::migrate!("./migrations/postgres");
    /// The first migration from which on older programs go on working.
    const FIRST_ADDITIVE: i64 = 60;

    #[test]
    fn a_newer_schema_fits_only_if_it_says_so() {
        let newest = newest_version(&SQLITE);
        let known: Vec<i64> = SQLITE.iter().map(|migration| migration.version).collect();
        let fit = |more: &[i64], min_schema| {
            let applied = known.iter().chain(more).copied().collect();
            FoundSchema { applied, min_schema }.fit(&SQLITE)
        };
        assert_eq!(fit(&[], Some(50)), SchemaFit::Known);
        assert_eq!(fit(&[], None), SchemaFit::Known);
        assert_eq!(fit(&[9000, 9001], Some(newest)), SchemaFit::Newer);
        assert_eq!(fit(&[9000], Some(50)), SchemaFit::Newer);
        assert_eq!(fit(&[9000, 9001], Some(9000)), SchemaFit::TooNew(9001));
        assert_eq!(fit(&[9000], None), SchemaFit::TooNew(9000));
        assert_eq!(fit(&[9], Some(50)), SchemaFit::Foreign(9));
        assert_eq!(fit(&[9, 9000], Some(50)), SchemaFit::Foreign(9));
        assert_eq!(FoundSchema::default().fit(&SQLITE), SchemaFit::Known);
    }

    /// What in a migration older programs could not work with; none if it only adds, or says that they cannot.
    fn breaks(sql: &str) -> Option<String> {
        let code: Vec<&str> = sql
            .lines()
            .map(|line| line.split("--").next().unwrap_or(""))
            .collect();
        let code = code.join(" ").to_uppercase();
        if code.trim_start().starts_with("UPDATE SCHEMA_COMPATIBILITY") {
            return None;
        }
        let words: Vec<&str> = code.split_whitespace().collect();
        let words = words.join(" ");
        for forbidden in [
            "DROP ",
            "RENAME ",
            "ALTER COLUMN ",
            "DELETE FROM ",
            "ADD CONSTRAINT ",
            "UNIQUE INDEX ",
        ] {
            if words.contains(forbidden) {
                return Some(forbidden.trim().to_owned());
            }
        }
        words
            .split(';')
            .filter(|statement| statement.contains("ADD COLUMN") && statement.contains("NOT NULL"))
            .find(|statement| !statement.contains("DEFAULT"))
            .map(|statement| statement.trim().to_owned())
    }

    #[test]
    fn what_older_programs_cannot_work_with_is_found() {
        for good in [
            "CREATE TABLE a (b TEXT NOT NULL); -- DROP nothing",
            "ALTER TABLE a ADD COLUMN b TEXT;\nALTER TABLE a ADD COLUMN c BIGINT NOT NULL DEFAULT 0;",
            "-- A new form of rows.\nUPDATE schema_compatibility SET min_schema = 70;\nDROP TABLE a;",
        ] {
            assert_eq!(breaks(good), None, "{good}");
        }
        for bad in [
            "DROP TABLE a;",
            "ALTER TABLE a\n  RENAME COLUMN b TO c;",
            "ALTER TABLE a ADD COLUMN b TEXT NOT NULL;",
            "CREATE UNIQUE INDEX i ON a (b);",
            "DROP TABLE a; UPDATE schema_compatibility SET min_schema = 70;",
        ] {
            assert!(breaks(bad).is_some(), "{bad}");
        }
    }

    /// Old and new servers run side by side because of this rule.
    #[test]
    fn migrations_only_add_or_say_what_they_break() {
        for migrations in [&SQLITE, &POSTGRES] {
            for migration in migrations.iter().filter(|one| one.version > FIRST_ADDITIVE) {
                assert_eq!(
                    breaks(migration.sql.as_str()),
                    None,
                    "migration {}",
                    migration.version
                );
            }
        }
        let versions = |migrations: &Migrator| -> Vec<i64> {
            let versions = migrations.iter().map(|one| one.version);
            versions.filter(|version| *version >= FIRST_ADDITIVE).collect()
        };
        assert_eq!(versions(&SQLITE), versions(&POSTGRES));
    }
}
