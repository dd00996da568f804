//! Installs a program: put together in a staging directory, then moved into place as a whole.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use oubliette_protocol::{
    Error, Result,
    program::{PackageRef, PackageRegistry},
};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::{ProgramStore, checked_program::CheckedProgram};
use crate::{
    lock::ProgramLock,
    manifest::{BinCommand, ProgramId, ProgramManifest, default_bin},
    npm::NpmInstaller,
    package_request::PackageRequest,
    progress::ProgressHandle,
    pypi::PypiInstaller,
    registries::{NpmConfig, PipConfig},
    sandboxed::InstallRun,
    version_range::npm_range_allows,
};

impl ProgramStore {
    /// Finds the exact version that a request means now.
    pub async fn find_version(self: &Arc<Self>, request: &PackageRequest) -> Result<PackageRef> {
        if let Some(pinned) = request.pinned() {
            return Ok(pinned);
        }
        let id = request.placeholder_id();
        let staging = self.begin(&id, request.to_string())?;
        let _slot = self.slots.acquire().await.map_err(Error::internal)?;
        let run = self.run_in(&staging);
        match request.registry {
            PackageRegistry::Npm => {
                let config = NpmConfig::read(&*self.env);
                let npm = NpmInstaller {
                    run: &run,
                    config: &config,
                };
                let version = npm.find_version(&request.name, &request.npm_range()).await?;
                PackageRef::parse_npm(&format!("{}@{version}", request.name))
            }
            PackageRegistry::Pypi => {
                let config = PipConfig::read(&*self.env);
                let pip = PypiInstaller {
                    run: &run,
                    config: &config,
                };
                let version = pip.find_version(&request.name, &request.pypi_specifier()).await?;
                Ok(PackageRef {
                    registry: PackageRegistry::Pypi,
                    name: request.name.clone(),
                    extras: request.extras.clone(),
                    version,
                })
            }
        }
    }

    /// Installs a program, or checks it if it is installed; one whose files have changed is installed anew. It goes on
    /// when this is dropped; whoever asks for the same program meanwhile waits for it.
    pub async fn install(self: &Arc<Self>, package: &PackageRef, scripts: bool) -> Result<ProgramManifest> {
        let (store, package) = (self.clone(), package.clone());
        let installing = self
            .runtime
            .spawn(async move { store.install_now(&package, scripts).await });
        installing.await.map_err(Error::internal)?
    }

    // Boxed, because a program may need another one: its Node.js.
    fn install_now<'a>(
        self: &'a Arc<Self>,
        package: &'a PackageRef,
        scripts: bool,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<ProgramManifest>> + Send + 'a>> {
        Box::pin(async move {
            let id = ProgramId::of(package, scripts);
            let lock = self.lock_of(&id);
            let _held = lock.lock().await;
            if self.is_installed(&id) {
                match self.check(&id).await {
                    Ok(checked) => return Ok(checked.manifest.clone()),
                    Err(error) => {
                        tracing::warn!(program = %id, error = %error.for_log(), "program is installed anew");
                    }
                }
            }
            let started = std::time::Instant::now();
            let manifest = self.install_from_registry(package, &id, scripts).await?;
            tracing::info!(program = %id, seconds = started.elapsed().as_secs(), bytes = manifest.bytes, "program installed");
            Ok(manifest)
        })
    }

    async fn install_from_registry(
        self: &Arc<Self>,
        package: &PackageRef,
        id: &ProgramId,
        scripts: bool,
    ) -> Result<ProgramManifest> {
        let staging = self.begin(id, package.to_string())?;
        let built = {
            let _slot = self.slots.acquire().await.map_err(Error::internal)?;
            let run = self.run_in(&staging);
            match package.registry {
                PackageRegistry::Npm => {
                    self.build_npm(&run, package, id, scripts, &staging.tree())
                        .await?
                }
                PackageRegistry::Pypi => {
                    let config = PipConfig::read(&*self.env);
                    let pip = PypiInstaller {
                        run: &run,
                        config: &config,
                    };
                    BuiltProgram {
                        bins: pip.install(package, id, scripts, &staging.tree()).await?,
                        skipped_scripts: Vec::new(),
                        node: None,
                    }
                }
            }
        };
        // Not while it holds a place: the other program needs one.
        let node = match built.node {
            Some(node) => {
                staging
                    .progress
                    .begin(format!("installing {node}, which it needs"));
                Some(self.install_now(&node, false).await?.program_id)
            }
            None => None,
        };
        staging.progress.begin("hashing and writing to disk");
        let manifest = ProgramManifest {
            program_id: id.clone(),
            package: package.to_string(),
            scripts,
            default_bin: default_bin(package, &built.bins),
            bins: built.bins,
            node,
            skipped_scripts: built.skipped_scripts,
            bytes: 0,
            files: 0,
            installed_at: oubliette_protocol::now(),
            lock_sha256: String::new(),
        };
        let (store, place) = (self.clone(), self.program_dir(id));
        tokio::task::spawn_blocking(move || store.put_in_place(manifest, &staging, &place))
            .await
            .map_err(Error::internal)?
    }

    async fn build_npm(
        &self,
        run: &InstallRun,
        package: &PackageRef,
        id: &ProgramId,
        scripts: bool,
        tree: &Path,
    ) -> Result<BuiltProgram> {
        let config = NpmConfig::read(&*self.env);
        let npm = NpmInstaller { run, config: &config };
        let installed = npm.install(package, id, scripts, tree).await?;
        let host = match installed.node_ranges.is_empty() {
            true => None,
            false => npm.host_node().await?,
        };
        let fits = |version| {
            installed
                .node_ranges
                .iter()
                .all(|range| npm_range_allows(range, version))
        };
        let node = match host {
            Some(version) if !fits(version) => Some(npm.choose_node(&installed.node_ranges).await?),
            Some(_) | None => None,
        };
        Ok(BuiltProgram {
            bins: installed.bins,
            skipped_scripts: if scripts {
                Vec::new()
            } else {
                installed.with_scripts
            },
            node,
        })
    }

    /// Writes lock and manifest of a tree that nothing writes to any more, and moves it to its place once it is on disk.
    fn put_in_place(
        &self,
        mut manifest: ProgramManifest,
        staging: &StagedInstall,
        place: &Path,
    ) -> Result<ProgramManifest> {
        let read = ProgramLock::read_tree(&staging.tree(), self.max_tree_bytes())?;
        let lock = serde_json::to_vec(&read.lock).map_err(Error::internal)?;
        manifest.lock_sha256 = hex::encode(Sha256::digest(&lock));
        (manifest.bytes, manifest.files) = (read.bytes, read.files);
        let text = serde_json::to_vec_pretty(&manifest).map_err(Error::internal)?;
        let program = staging.dir.join("program");
        let written = std::fs::write(program.join("lock.json"), &lock)
            .and_then(|()| std::fs::write(program.join("program.json"), &text))
            .and_then(|()| sync_file_system(&program))
            .and_then(|()| match place.exists() {
                true => std::fs::rename(place, staging.dir.join("replaced")),
                false => Ok(()),
            })
            .and_then(|()| std::fs::rename(&program, place))
            .and_then(|()| std::fs::File::open(self.home.programs_dir())?.sync_all());
        written.map_err(|error| {
            Error::unavailable(
                "the installed program could not be written to disk; nothing of it is used. Make room and install again",
            )
            .with_cause(error)
        })?;
        // What was hashed just now need not be hashed again.
        let checked = CheckedProgram {
            manifest: manifest.clone(),
            stamps: read.stamps.moved(&staging.tree(), &place.join("tree")),
        };
        self.checked
            .lock()
            .insert(manifest.program_id.clone(), Arc::new(checked));
        Ok(manifest)
    }

    /// Makes the directory of an installation.
    fn begin(self: &Arc<Self>, id: &ProgramId, package: String) -> Result<StagedInstall> {
        oubliette_home::safe_fs::create_private_dir(&self.home.programs_dir())?;
        oubliette_home::safe_fs::create_private_dir(&self.staging_dir())?;
        let dir = self.staging_dir().join(uuid::Uuid::new_v4().simple().to_string());
        for part in ["program/tree", "scratch"] {
            std::fs::create_dir_all(dir.join(part)).map_err(|error| {
                Error::unavailable("no directory for the installation could be made").with_cause(error)
            })?;
        }
        let progress = ProgressHandle::new(id.clone(), package);
        self.installing.lock().insert(id.clone(), progress.clone());
        Ok(StagedInstall {
            store: self.clone(),
            id: id.clone(),
            dir,
            progress,
        })
    }

    /// How long the files of a program may be together: as much as an installation may have on disk.
    pub(super) fn max_tree_bytes(&self) -> u64 {
        self.sandboxes.limits.disk_mb.saturating_mul(1 << 20)
    }

    fn run_in(&self, staging: &StagedInstall) -> InstallRun {
        InstallRun {
            sandboxes: self.sandboxes.clone(),
            dir: staging.dir.clone(),
            deadline: Instant::now() + self.sandboxes.limits.timeout,
            progress: staging.progress.clone(),
        }
    }
}

/// What npm or pip made.
struct BuiltProgram {
    bins: BTreeMap<String, BinCommand>,
    skipped_scripts: Vec<String>,
    node: Option<PackageRef>,
}

/// The directory of an installation under way; removed when dropped.
struct StagedInstall {
    store: Arc<ProgramStore>,
    id: ProgramId,
    dir: PathBuf,
    progress: ProgressHandle,
}

impl StagedInstall {
    fn tree(&self) -> PathBuf {
        self.dir.join("program/tree")
    }
}

impl Drop for StagedInstall {
    fn drop(&mut self) {
        self.store.installing.lock().remove(&self.id);
        let (home, dir) = (self.store.home.clone(), self.dir.clone());
        self.store.runtime.spawn(async move { home.discard(&dir).await });
    }
}

/// Writes everything of the file system to disk: one call instead of one for each of thousands of files.
fn sync_file_system(dir: &Path) -> io::Result<()> {
    Ok(rustix::fs::syncfs(std::fs::File::open(dir)?)?)
}
