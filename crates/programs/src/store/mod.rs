//! [`ProgramStore`]: the programs of a home. Installs them, checks them before they are used, and says how they are run.
//!
//! `HOME/programs/<program_id>/` holds `tree/`, which sandboxes see, `lock.json`, the hash of every file in it, and
//! `program.json`. An installation is put together in `HOME/programs/.staging/` and moved into place as a whole when it is
//! on disk, so that what is there is complete.
//!
//! - `installation`: installs one program; `checked_program`: compares one with its lock; `launch`: how one is run.

mod checked_program;
mod installation;
mod launch;

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use oubliette_home::HomeDir;
use oubliette_protocol::{Error, Result};
use oubliette_sandbox::SandboxDriver;
use parking_lot::Mutex;

use self::checked_program::CheckedProgram;
pub use self::launch::ProgramLaunch;
use crate::{
    manifest::{ProgramId, ProgramManifest},
    progress::{InstallProgress, ProgressHandle},
    registries::EnvironmentVariables,
    sandboxed::{InstallLimits, InstallSandboxes, remove_leftover_sockets},
};

/// Maximum size of a program.json, in bytes.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// How many installations run at once; more wait.
const MAX_INSTALLATIONS: usize = 2;

/// The programs of a home.
pub struct ProgramStore {
    home: Arc<HomeDir>,
    sandboxes: InstallSandboxes,
    /// Where installations run: callers may be on a thread that must not be kept busy.
    runtime: tokio::runtime::Handle,
    /// The server's environment, for the operator's package configuration.
    env: Box<EnvironmentVariables>,
    /// Programs that were checked since the server's start.
    checked: Mutex<HashMap<ProgramId, Arc<CheckedProgram>>>,
    /// One lock a program: whoever installs or checks it holds it.
    locks: Mutex<HashMap<ProgramId, Arc<tokio::sync::Mutex<()>>>>,
    installing: Mutex<BTreeMap<ProgramId, ProgressHandle>>,
    slots: tokio::sync::Semaphore,
}

impl ProgramStore {
    /// The programs of a home, to be opened within a tokio runtime. There must be no other server of this home: what a
    /// killed one was installing is removed.
    pub fn open(
        home: Arc<HomeDir>,
        driver: Arc<dyn SandboxDriver>,
        limits: InstallLimits,
        env: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let store = Self::reader(home, driver, limits, env);
        remove_leftover_sockets(store.home.sockets_dir());
        let staging = store.staging_dir();
        if staging.exists() {
            let home = store.home.clone();
            store.runtime.spawn(async move { home.discard(&staging).await });
        }
        store
    }

    /// The programs of a home of which a server may be running.
    pub fn reader(
        home: Arc<HomeDir>,
        driver: Arc<dyn SandboxDriver>,
        limits: InstallLimits,
        env: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            sandboxes: InstallSandboxes {
                driver,
                sockets_dir: home.sockets_dir().to_owned(),
                limits,
            },
            home,
            runtime: tokio::runtime::Handle::current(),
            env: Box::new(env),
            checked: Mutex::default(),
            locks: Mutex::default(),
            installing: Mutex::default(),
            slots: tokio::sync::Semaphore::new(MAX_INSTALLATIONS),
        })
    }

    fn staging_dir(&self) -> PathBuf {
        self.home.programs_dir().join(".staging")
    }

    fn program_dir(&self, id: &ProgramId) -> PathBuf {
        self.home.programs_dir().join(id.as_str())
    }

    fn tree(&self, id: &ProgramId) -> PathBuf {
        self.program_dir(id).join("tree")
    }

    /// Whether a program is installed. Its files are not checked.
    pub fn is_installed(&self, id: &ProgramId) -> bool {
        Self::is_installed_in(&self.home, id)
    }

    /// Whether a home has a program. Its files are not checked.
    pub fn is_installed_in(home: &HomeDir, id: &ProgramId) -> bool {
        home.programs_dir()
            .join(id.as_str())
            .join("program.json")
            .is_file()
    }

    /// All installed programs, by id.
    pub fn list(&self) -> Vec<ProgramManifest> {
        let dir = std::fs::read_dir(self.home.programs_dir());
        let mut programs: Vec<ProgramManifest> = dir
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<ProgramId>().ok())
            .filter_map(|id| self.read_manifest(&id).ok())
            .collect();
        programs.sort_by(|a, b| a.program_id.cmp(&b.program_id));
        programs
    }

    /// The installations under way.
    pub fn installing(&self) -> Vec<InstallProgress> {
        self.installing
            .lock()
            .values()
            .map(ProgressHandle::snapshot)
            .collect()
    }

    /// One installed program.
    pub fn get(&self, id: &ProgramId) -> Result<ProgramManifest> {
        match self.is_installed(id) {
            true => self.read_manifest(id),
            false => Err(not_installed(id)),
        }
    }

    /// Removes a program. Whether it is used is for the caller to know, except by other programs.
    pub async fn remove(&self, id: &ProgramId) -> Result<()> {
        if !self.program_dir(id).exists() {
            return Err(not_installed(id));
        }
        let users: Vec<String> = self
            .list()
            .into_iter()
            .filter(|program| program.node.as_ref() == Some(id))
            .map(|program| program.program_id.to_string())
            .collect();
        if !users.is_empty() {
            return Err(Error::conflict(format!(
                "{id} is the Node.js of {}; remove these first",
                users.join(", ")
            )));
        }
        let lock = self.lock_of(id);
        let _held = lock.lock().await;
        self.checked.lock().remove(id);
        self.home.discard(&self.program_dir(id)).await;
        Ok(())
    }

    fn lock_of(&self, id: &ProgramId) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.locks.lock();
        // Nobody holds or waits for these any more.
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        locks.entry(id.clone()).or_default().clone()
    }

    fn read_manifest(&self, id: &ProgramId) -> Result<ProgramManifest> {
        let broken = |cause: String| {
            Error::unavailable(format!(
                "program.json of the program {id} cannot be read; remove it with `oubliette program remove {id}` and \
                 install it anew"
            ))
            .with_cause(cause)
        };
        let bytes = read_bounded(&self.program_dir(id).join("program.json"), MAX_MANIFEST_BYTES)
            .map_err(|error| broken(error.to_string()))?;
        let manifest: ProgramManifest =
            serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
        match manifest.program_id == *id {
            true => Ok(manifest),
            false => Err(broken(format!("it is that of {}", manifest.program_id))),
        }
    }
}

fn not_installed(id: &ProgramId) -> Error {
    Error::not_found(format!(
        "there is no program {id}; `oubliette program list` shows those that are installed"
    ))
}

fn read_bounded(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    match std::fs::metadata(path)?.len() <= most {
        true => std::fs::read(path),
        false => Err(io::Error::other(format!("larger than {most} bytes"))),
    }
}
