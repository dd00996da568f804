//! Isolation levels.

use serde::{Deserialize, Serialize};

/// How strongly a sandbox is isolated, strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IsolationLevel {
    /// Own user, pid, mount, network, ipc and uts namespaces; Landlock and seccomp inside.
    Namespaces,
    /// Landlock and seccomp in the host's namespaces: access to files and the network is restricted, but other
    /// processes and Unix sockets are visible, and paths are the host's.
    Landlock,
    /// No isolation: ordinary processes of the host, ended as a whole tree.
    None,
}

impl IsolationLevel {
    /// The level's name in configuration and API results.
    pub fn as_str(self) -> &'static str {
        match self {
            IsolationLevel::Namespaces => "namespaces",
            IsolationLevel::Landlock => "landlock",
            IsolationLevel::None => "none",
        }
    }

    /// Whether this level is at least as strong as `minimum`.
    pub fn reaches(self, minimum: IsolationLevel) -> bool {
        self.strength() >= minimum.strength()
    }

    fn strength(self) -> u8 {
        match self {
            IsolationLevel::Namespaces => 2,
            IsolationLevel::Landlock => 1,
            IsolationLevel::None => 0,
        }
    }
}

impl std::fmt::Display for IsolationLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for IsolationLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "namespaces" => Ok(IsolationLevel::Namespaces),
            "landlock" => Ok(IsolationLevel::Landlock),
            "none" => Ok(IsolationLevel::None),
            other => Err(format!(
                "`{other}` is not an isolation level: use `namespaces` or `landlock`"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::IsolationLevel;

    #[test]
    fn stronger_levels_reach_weaker_minimums() {
        assert!(IsolationLevel::Namespaces.reaches(IsolationLevel::Landlock));
        assert!(IsolationLevel::Landlock.reaches(IsolationLevel::Landlock));
        assert!(!IsolationLevel::Landlock.reaches(IsolationLevel::Namespaces));
        assert!(!IsolationLevel::None.reaches(IsolationLevel::Landlock));
    }

    #[test]
    fn names_round_trip() {
        for level in [
            IsolationLevel::Namespaces,
            IsolationLevel::Landlock,
            IsolationLevel::None,
        ] {
            assert_eq!(level.as_str().parse::<IsolationLevel>(), Ok(level));
        }
    }
}
