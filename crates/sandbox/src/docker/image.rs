//! Images: finding or pulling one, and which exactly it is.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bollard::models::{CreateImageInfo, ImageInspect};
use bollard::query_parameters::CreateImageOptions;
use futures::StreamExt as _;

use super::engine::{Engine, is_not_found};
use crate::driver::{PinnedImage, SandboxError};

/// Maximum length of an image's name.
const MAX_NAME_BYTES: usize = 300;
/// Maximum time between two reports of a pull, and its whole duration.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
const PULL_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Maximum number of layers whose progress is followed.
const MAX_LAYERS: usize = 1000;
/// Bounds of what is taken from an image's configuration.
const MAX_ENV: usize = 256;
const MAX_ENV_BYTES: usize = 32 * 1024;
const MAX_VOLUMES: usize = 32;

/// No image is named anywhere.
pub(super) fn none_named() -> SandboxError {
    SandboxError::Invalid(
        "no image: set sandbox.image in agent.json or in the project, or [sandbox.docker] image in oubliette.toml".into(),
    )
}

/// What a container takes from its image.
pub(super) struct ImageDefaults {
    /// The image's environment.
    pub(super) env: Vec<(String, String)>,
    /// Places that would become volumes on the engine's disk.
    pub(super) volumes: Vec<String>,
}

/// Finds the image, or pulls it.
pub(super) async fn prepare(
    engine: &Engine,
    name: &str,
    pinned: Option<&str>,
    progress: &(dyn Fn(String) + Send + Sync),
) -> Result<PinnedImage, SandboxError> {
    check_name(name)?;
    let docker = engine.client().await?;
    let exact = pinned.unwrap_or(name);
    let found = match docker.inspect_image(exact).await {
        Ok(found) => found,
        Err(error) if is_not_found(&error) => {
            // A bare id is known to nobody else.
            if pinned.is_some() && !exact.contains('@') {
                return Err(SandboxError::Unavailable {
                    reason: format!("the image {name} with which this session was started, {exact}, is gone"),
                    remedy: "Load it into the engine again, or start a new session.".into(),
                });
            }
            pull(engine, exact, progress).await?;
            let pulled = docker.inspect_image(exact).await;
            pulled.map_err(|error| engine.failed("looking at the image", &error))?
        }
        Err(error) => return Err(engine.failed("looking at the image", &error)),
    };
    check_platform(name, &found)?;
    let digest = match pinned {
        Some(pinned) => pinned.to_owned(),
        None => {
            let published = found.repo_digests.as_deref().unwrap_or_default().first();
            published.or(found.id.as_ref()).cloned().ok_or_else(|| {
                SandboxError::Setup(format!("the engine names no digest of the image {name}"))
            })?
        }
    };
    Ok(PinnedImage {
        name: name.to_owned(),
        digest,
    })
}

/// An image's name is passed on to the engine in a path, and shown: only what references consist of.
pub(crate) fn check_name(name: &str) -> Result<(), SandboxError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@".contains(&byte);
    let plain = name.bytes().all(allowed) && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    let wrong = name.len() > MAX_NAME_BYTES || !plain || name.contains("..") || name.contains("//");
    match wrong {
        true => Err(SandboxError::Invalid(format!(
            "sandbox.image: {name:?} is not an image reference such as \"debian:12\" or \"registry.example/team/image@sha256:…\""
        ))),
        false => Ok(()),
    }
}

fn check_platform(name: &str, image: &ImageInspect) -> Result<(), SandboxError> {
    let own = architecture();
    let (os, arch) = (
        image.os.as_deref().unwrap_or("linux"),
        image.architecture.as_deref().unwrap_or(own),
    );
    if os == "linux" && (arch == own || arch.is_empty()) {
        return Ok(());
    }
    Err(SandboxError::Unavailable {
        reason: format!("the image {name} is for {os}/{arch}, and this machine is linux/{own}"),
        remedy: format!(
            "Use a build of the image for linux/{own}: `docker pull --platform linux/{own} {name}`."
        ),
    })
}

/// This machine's architecture, in the words of images.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

async fn pull(
    engine: &Engine,
    name: &str,
    progress: &(dyn Fn(String) + Send + Sync),
) -> Result<(), SandboxError> {
    let docker = engine.client().await?;
    // Without a tag the engine would pull all of them.
    let last = name.rsplit('/').next().unwrap_or(name);
    let tag = (!last.contains([':', '@'])).then(|| "latest".to_owned());
    let options = CreateImageOptions {
        from_image: Some(name.to_owned()),
        tag,
        ..CreateImageOptions::default()
    };
    progress(format!("pulling the image {name}"));
    let mut layers = PullProgress::default();
    let pulling = async {
        let mut steps = std::pin::pin!(docker.create_image(Some(options), None, None));
        let mut reported = Instant::now();
        while let Some(step) = steps.next().await {
            let step = step.map_err(|error| pull_failed(engine, name, &error))?;
            if let Some(detail) = step
                .error_detail
                .as_ref()
                .and_then(|detail| detail.message.as_ref())
            {
                return Err(pull_refused(name, detail));
            }
            layers.note(&step);
            if reported.elapsed() >= PROGRESS_INTERVAL {
                reported = Instant::now();
                progress(format!("pulling the image {name}: {layers}"));
            }
        }
        Ok(())
    };
    tokio::time::timeout(PULL_TIMEOUT, pulling)
        .await
        .unwrap_or_else(|_| Err(pull_refused(name, "it took longer than 30 minutes")))
}

fn pull_failed(engine: &Engine, name: &str, error: &bollard::errors::Error) -> SandboxError {
    use bollard::errors::Error;
    match error {
        Error::DockerResponseServerError { message, .. } => pull_refused(name, message),
        Error::DockerStreamError { error } => pull_refused(name, error),
        _ => engine.failed("pulling the image", error),
    }
}

fn pull_refused(name: &str, said: &str) -> SandboxError {
    let said = said.trim();
    let missing = ["not found", "manifest unknown", "does not exist", "no such"];
    let lower = said.to_ascii_lowercase();
    let remedy = if missing.iter().any(|word| lower.contains(word)) {
        "Is the name right, with its registry and tag? An image that is not in a registry has to be loaded into the engine: \
         `docker load` or `docker import`."
    } else if lower.contains("denied") || lower.contains("unauthorized") {
        "The registry wants a login or has no such image: pull it by hand (`docker login`, `docker pull`), and start again."
    } else {
        "The engine reaches no registry, or not this one: check its network and proxy, or load the image with `docker load`."
    };
    SandboxError::Unavailable {
        reason: format!("the image {name} is not on this machine and could not be pulled: {said}"),
        remedy: remedy.into(),
    }
}

/// How far a pull is.
#[derive(Default)]
struct PullProgress {
    /// Bytes there and in all of each layer.
    layers: HashMap<String, (i64, i64)>,
}

impl PullProgress {
    fn note(&mut self, step: &CreateImageInfo) {
        let Some(id) = &step.id else { return };
        let known = self.layers.contains_key(id);
        if let Some(detail) = &step.progress_detail
            && let (Some(current), Some(total)) = (detail.current, detail.total)
            && (known || self.layers.len() < MAX_LAYERS)
        {
            self.layers.insert(id.clone(), (current, total));
        }
    }
}

impl std::fmt::Display for PullProgress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (done, all) = self
            .layers
            .values()
            .fold((0_i64, 0_i64), |sum, (current, total)| {
                (sum.0.saturating_add(*current), sum.1.saturating_add(*total))
            });
        write!(
            f,
            "{} of {} MB in {} layers",
            done >> 20,
            all >> 20,
            self.layers.len()
        )
    }
}

/// What a container takes from the image.
pub(super) async fn defaults(engine: &Engine, image: &PinnedImage) -> Result<ImageDefaults, SandboxError> {
    let docker = engine.client().await?;
    let found = match docker.inspect_image(&image.digest).await {
        Ok(found) => found,
        Err(error) if is_not_found(&error) => {
            return Err(SandboxError::Unavailable {
                reason: format!(
                    "the image {} ({}) is not in the engine any more",
                    image.name, image.digest
                ),
                remedy: "Load it again, or start a new session.".into(),
            });
        }
        Err(error) => return Err(engine.failed("looking at the image", &error)),
    };
    let config = found.config.unwrap_or_default();
    let mut bytes = 0;
    let variables = config.env.unwrap_or_default().into_iter().take(MAX_ENV);
    let env = variables.filter_map(|variable| {
        bytes += variable.len();
        let (name, value) = variable.split_once('=')?;
        (bytes <= MAX_ENV_BYTES && !name.is_empty()).then(|| (name.to_owned(), value.to_owned()))
    });
    let env = env.collect();
    let mut volumes = config.volumes.unwrap_or_default();
    volumes.truncate(MAX_VOLUMES);
    Ok(ImageDefaults { env, volumes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_not_references_are_refused() {
        for good in [
            "debian:12",
            "a/b/c@sha256:00ff",
            "localhost:5000/x:latest",
            "sha256:00ff",
        ] {
            check_name(good).unwrap();
        }
        let long = "a".repeat(301);
        for bad in [
            "", "-v", "../x", "a b", "a\n", "a?x=1", "a//b", "/a", "a#b", "ä", &long,
        ] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_image_for_another_machine_is_refused_with_a_remedy() {
        let image = |os: &str, architecture: &str| ImageInspect {
            os: Some(os.into()),
            architecture: Some(architecture.into()),
            ..ImageInspect::default()
        };
        check_platform("x", &image("linux", architecture())).unwrap();
        let refused = check_platform("x", &image("linux", "s390x")).unwrap_err();
        assert!(refused.to_string().contains("linux/s390x") && refused.remedy().is_some());
        assert!(check_platform("x", &image("windows", architecture())).is_err());
    }
}
