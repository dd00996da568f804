//! How strong the walls are.

use serde::{Deserialize, Serialize};

/// The isolation a sandbox has, strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Own user, pid, mount, network, ipc and uts namespaces; Landlock and seccomp inside.
    Namespaces,
    /// Landlock and seccomp on the host's own namespaces: files and the network are closed, but other
    /// processes and Unix sockets can be seen, and paths are the host's.
    Landlock,
    /// No walls: a process of the host, ended as a whole tree.
    None,
}

impl Level {
    /// The level as it stands in configuration and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Namespaces => "namespaces",
            Level::Landlock => "landlock",
            Level::None => "none",
        }
    }

    /// Whether these walls are at least as strong as `minimum`.
    pub fn reaches(self, minimum: Level) -> bool {
        self.strength() >= minimum.strength()
    }

    fn strength(self) -> u8 {
        match self {
            Level::Namespaces => 2,
            Level::Landlock => 1,
            Level::None => 0,
        }
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "namespaces" => Ok(Level::Namespaces),
            "landlock" => Ok(Level::Landlock),
            "none" => Ok(Level::None),
            other => Err(format!(
                "`{other}` is not an isolation level: use `namespaces` or `landlock`"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Level;

    #[test]
    fn stronger_levels_reach_weaker_minimums() {
        assert!(Level::Namespaces.reaches(Level::Landlock));
        assert!(Level::Landlock.reaches(Level::Landlock));
        assert!(!Level::Landlock.reaches(Level::Namespaces));
        assert!(!Level::None.reaches(Level::Landlock));
    }

    #[test]
    fn names_round_trip() {
        for level in [Level::Namespaces, Level::Landlock, Level::None] {
            assert_eq!(level.as_str().parse::<Level>(), Ok(level));
        }
    }
}
