//! Where paths of this machine are on the shared volume.

use std::path::{Path, PathBuf};

use crate::driver::SandboxError;

/// The name of the volume in a pod.
pub(super) const VOLUME_NAME: &str = "shared";

/// A volume that this server and the pods have mounted.
#[derive(Debug)]
pub(super) struct SharedVolume {
    /// Where it is mounted here.
    root: PathBuf,
    /// Its PersistentVolumeClaim.
    claim: String,
}

impl SharedVolume {
    pub(super) fn new(root: &Path, claim: &str) -> Self {
        Self {
            root: root.to_owned(),
            claim: claim.to_owned(),
        }
    }

    /// Its PersistentVolumeClaim.
    pub(super) fn claim(&self) -> &str {
        &self.claim
    }

    /// A path of this machine as the volume knows it. Links are followed first: a pod would follow them elsewhere.
    pub(super) fn sub_path(&self, host: &Path) -> Result<String, SandboxError> {
        let canonical = |path: &Path| {
            std::fs::canonicalize(path)
                .map_err(|error| SandboxError::Invalid(format!("{}: {error}", path.display())))
        };
        let (root, host) = (canonical(&self.root)?, canonical(host)?);
        let beneath = host.strip_prefix(&root).map_err(|_| {
            SandboxError::Invalid(format!(
                "{} is not on the volume that pods share with this server, which is mounted at {} ([sandbox.kubernetes] \
                 volume_path): keep Oubliette's home and [workspaces] dir on that volume, and copy there what [trust] read_only \
                 lists",
                host.display(),
                root.display()
            ))
        })?;
        match beneath.to_str() {
            Some("") => Err(SandboxError::Invalid(format!(
                "{} is the whole volume that pods share with this server; a sandbox may see only a folder of it",
                host.display()
            ))),
            Some(text) => Ok(text.to_owned()),
            None => Err(SandboxError::Invalid(format!(
                "{} is not UTF-8, which Kubernetes needs",
                host.display()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_beneath_the_volume_can_be_mounted() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("volume");
        std::fs::create_dir_all(root.join("home/a")).unwrap();
        std::os::unix::fs::symlink("/etc", root.join("out")).unwrap();
        std::os::unix::fs::symlink(root.join("home"), dir.path().join("in")).unwrap();
        let volume = SharedVolume::new(&root, "claim");
        assert_eq!(volume.sub_path(&root.join("home/a")).unwrap(), "home/a");
        assert_eq!(
            volume.sub_path(&dir.path().join("in/a")).unwrap(),
            "home/a",
            "by way of a link"
        );
        for refused in [
            Path::new("/etc").to_owned(),
            root.join("out"),
            root.join("home/../.."),
        ] {
            let why = volume.sub_path(&refused).unwrap_err().to_string();
            assert!(why.contains("volume_path"), "{why}");
        }
        let whole = volume.sub_path(&root).unwrap_err().to_string();
        assert!(whole.contains("whole volume"), "{whole}");
        assert!(volume.sub_path(&root.join("missing")).is_err());
    }
}
