//! What the engine can do, and removing what a killed server left.

use std::time::{Duration, Instant};

use bollard::models::SystemInfo;
use bollard::query_parameters::{ListContainersOptions, RemoveContainerOptions};

use super::{DockerDriverInner, image};
use crate::IsolationLevel;
use crate::container::{self, SCOPE_LABEL, SERVER_LABEL, first_process};
use crate::driver::{SandboxCheck, SandboxError, SandboxReport};
use crate::local::group_watch;
use crate::local::leftovers::ServerIdentity;

/// A probe that failed is repeated after this long, one that did not after the other.
const RETRY_AFTER: Duration = Duration::from_secs(5);
const REPEAT_AFTER: Duration = Duration::from_secs(20);
/// The oldest engine: with it the tests run.
const OLDEST_API: (u32, u32) = (1, 41);

impl DockerDriverInner {
    /// The last report, or a new one. The first one removes leftovers.
    pub(super) async fn probe(&self) -> SandboxReport {
        let mut probed = self.probed.lock().await;
        if let Some((when, report)) = &*probed {
            let keep = if report.ok { REPEAT_AFTER } else { RETRY_AFTER };
            if when.elapsed() < keep {
                return report.clone();
            }
        }
        if probed.as_ref().is_none_or(|(_, last)| !last.ok) {
            match self.remove_leftovers().await {
                Ok(0) | Err(_) => {}
                Ok(removed) => tracing::warn!(removed, "removed containers that an earlier server left"),
            }
        }
        let report = self.new_report().await;
        *probed = Some((Instant::now(), report.clone()));
        report
    }

    /// An error if no sandbox can be started.
    pub(super) async fn refusal(&self) -> Result<(), SandboxError> {
        let report = self.probe().await;
        match report.checks.iter().find(|check| !check.ok && !report.ok) {
            None => Ok(()),
            Some(failed) => Err(SandboxError::Unavailable {
                reason: failed.detail.clone(),
                remedy: failed.remedy.clone().unwrap_or_default(),
            }),
        }
    }

    async fn new_report(&self) -> SandboxReport {
        let mut report = SandboxReport {
            driver: "docker",
            level: IsolationLevel::Namespaces,
            ok: true,
            checks: Vec::new(),
        };
        let info = match self.ask().await {
            Ok((version, info)) => {
                report
                    .checks
                    .push(SandboxCheck::passed("container engine", version));
                info
            }
            Err(error) => {
                let (reason, remedy) = match error {
                    SandboxError::Unavailable { reason, remedy } => (reason, remedy),
                    other => (other.to_string(), String::new()),
                };
                report.ok = false;
                report
                    .checks
                    .push(SandboxCheck::failed("container engine", reason, remedy));
                return report;
            }
        };
        let user = self.check_user(&info);
        report.ok &= user.ok;
        report.checks.push(user);
        let client = first_process::check(&self.config.client);
        report.ok &= client.ok;
        report.checks.push(client);
        report.checks.push(self.check_image().await);
        if let Some(runtime) = &self.config.runtime {
            let known = info
                .runtimes
                .as_ref()
                .is_some_and(|all| all.contains_key(runtime));
            report.ok &= known;
            report.checks.push(match known {
                true => SandboxCheck::passed("container runtime", runtime.clone()),
                false => SandboxCheck::failed(
                    "container runtime",
                    format!("the engine has no runtime {runtime:?}"),
                    "Install it and name it in the engine's daemon.json, or leave out [sandbox.docker] runtime.",
                ),
            });
        }
        report.checks.extend(isolation_checks(&info));
        report.checks.extend(limit_checks(&info));
        report
    }

    /// The engine's name and version, and what it says of itself.
    async fn ask(&self) -> Result<(String, SystemInfo), SandboxError> {
        let docker = self.engine.client().await?;
        let version = docker.version().await;
        let version = version.map_err(|error| self.engine.failed("asking the engine", &error))?;
        let info = docker.info().await;
        let info = info.map_err(|error| self.engine.failed("asking the engine", &error))?;
        let name = version.components.as_deref().unwrap_or_default().first();
        let name = name.map_or("engine", |component| component.name.as_str());
        let api = version.api_version.clone().unwrap_or_default();
        let described = format!(
            "{name} {} at {}, API {api}",
            version.version.unwrap_or_default(),
            self.engine.host()
        );
        let mut numbers = api.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        let numbers = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if numbers < OLDEST_API {
            return Err(SandboxError::Unavailable {
                reason: format!("{described} is too old"),
                remedy: "Use Docker 20.10 or later.".into(),
            });
        }
        Ok((described, info))
    }

    /// Whether files of the workspace can belong to a user who is not root inside.
    fn check_user(&self, info: &SystemInfo) -> SandboxCheck {
        let options = info.security_options.as_deref().unwrap_or_default();
        let has = |name: &str| {
            options
                .iter()
                .any(|option| option.contains(&format!("name={name}")))
        };
        if has("rootless") || has("userns") {
            return SandboxCheck::failed(
                "container user",
                "this engine maps users: in its containers the files of this user belong to root, and nothing may run as root",
                "Use an engine without user mapping (neither rootless nor `userns-remap`), or [sandbox] driver = \"local\", \
                 which needs no rights at all.",
            );
        }
        SandboxCheck::passed(
            "container user",
            format!("uid {}, not root; capabilities: none", self.user.uid),
        )
    }

    /// Whether the default image is there. It is pulled when it is first needed.
    async fn check_image(&self) -> SandboxCheck {
        let Some(name) = &self.config.image else {
            return SandboxCheck::passed("default image", "none: each agent or project names its own");
        };
        let Ok(docker) = self.engine.client().await else {
            return SandboxCheck::failed("default image", "the engine does not answer", "");
        };
        match docker.inspect_image(name).await {
            Ok(found) => match found.architecture.as_deref().unwrap_or_default() {
                "" => SandboxCheck::passed("default image", name.clone()),
                arch if arch == image::architecture() => SandboxCheck::passed("default image", name.clone()),
                arch => SandboxCheck::failed(
                    "default image",
                    format!(
                        "{name} is for {arch}, and this machine is {}",
                        image::architecture()
                    ),
                    format!(
                        "Pull a build for it: `docker pull --platform linux/{} {name}`.",
                        image::architecture()
                    ),
                ),
            },
            Err(_) => SandboxCheck::failed(
                "default image",
                format!("{name} is not on this machine"),
                format!("It is pulled when it is first needed. To do it now: `docker pull {name}`."),
            ),
        }
    }

    /// Removes containers of this home whose server does not run any more.
    async fn remove_leftovers(&self) -> Result<usize, SandboxError> {
        container::remove_stale_stage_dirs(&self.config.run_dir);
        let docker = self.engine.client().await?;
        let label = format!("{SCOPE_LABEL}={}", self.scope);
        let options = ListContainersOptions {
            all: true,
            filters: Some([("label".to_owned(), vec![label])].into()),
            ..ListContainersOptions::default()
        };
        let listed = docker.list_containers(Some(options)).await;
        let listed = listed.map_err(|error| self.engine.failed("listing containers", &error))?;
        let mut removed = 0;
        for container in listed {
            let labels = container.labels.unwrap_or_default();
            let server = labels
                .get(SERVER_LABEL)
                .and_then(|text| text.parse::<ServerIdentity>().ok());
            let left = server.is_none_or(|server| !server.is_running());
            let Some(id) = container.id.filter(|_| left) else {
                continue;
            };
            let force = RemoveContainerOptions {
                force: true,
                v: true,
                ..RemoveContainerOptions::default()
            };
            match docker.remove_container(&id, Some(force)).await {
                Ok(()) => removed += 1,
                Err(error) => tracing::warn!(%error, container = id, "removing a leftover container failed"),
            }
        }
        Ok(removed)
    }
}

fn isolation_checks(info: &SystemInfo) -> Vec<SandboxCheck> {
    let options = info.security_options.as_deref().unwrap_or_default();
    let seccomp = options.iter().any(|option| option.contains("seccomp"));
    let runtime = info.default_runtime.as_deref().unwrap_or("runc");
    vec![
        SandboxCheck::passed(
            "namespaces",
            format!("pid, mount, network, ipc and uts, by the engine ({runtime}); no user namespace"),
        ),
        match seccomp {
            true => SandboxCheck::passed("seccomp", "the engine's filter and Oubliette's"),
            false => SandboxCheck::failed(
                "seccomp",
                "the engine has none; Oubliette's filter alone",
                "Use an engine and a kernel with seccomp.",
            ),
        },
    ]
}

fn limit_checks(info: &SystemInfo) -> Vec<SandboxCheck> {
    let counted = format!(
        "each container by the engine; a session as a whole is counted every {} ms",
        group_watch::INTERVAL.as_millis()
    );
    let check = |name, has: Option<bool>| match has.unwrap_or(true) {
        true => SandboxCheck::passed(name, counted.clone()),
        false => SandboxCheck::failed(
            name,
            "the engine does not keep it on this machine",
            "Use a kernel with this cgroup controller.",
        ),
    };
    vec![
        check("memory limit", info.memory_limit),
        check("process limit", info.pids_limit),
        check("cpu limit", info.cpu_cfs_quota),
    ]
}
