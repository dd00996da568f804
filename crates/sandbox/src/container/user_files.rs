//! Files that name the container's user, which images do not know: some programs do not start without a name.

use std::path::{Path, PathBuf};

use crate::spec::HOME;
use crate::stage::server_end::StageUser;

/// `passwd` and `group` in a directory of their own.
#[derive(Debug)]
pub(crate) struct UserFiles {
    dir: PathBuf,
    user: StageUser,
}

impl UserFiles {
    /// Those of a user, beneath a directory.
    pub(crate) fn new(run_dir: &Path, user: StageUser) -> Self {
        Self {
            dir: run_dir.join("container-etc"),
            user,
        }
    }

    /// The path of `passwd` or `group`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Writes the files, unless they are there.
    pub(crate) fn write(&self) -> std::io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let user = self.user;
        let passwd = format!(
            "root:x:0:0:root:/root:/bin/sh\nagent:x:{}:{}:agent:{HOME}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
            user.uid, user.gid
        );
        let group = format!("root:x:0:\nagent:x:{}:\nnogroup:x:65534:\n", user.gid);
        for (name, text) in [("passwd", passwd), ("group", group)] {
            let path = self.path(name);
            std::fs::create_dir_all(&self.dir)?;
            if std::fs::read_to_string(&path).is_ok_and(|old| old == text) {
                continue;
            }
            let aside = path.with_extension("new");
            std::fs::write(&aside, text)?;
            std::fs::set_permissions(&aside, std::fs::Permissions::from_mode(0o644))?;
            std::fs::rename(aside, path)?;
        }
        Ok(())
    }
}
