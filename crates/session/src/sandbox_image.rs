//! The image of a session's sandboxes.
//!
//! The name that an agent or a project gives stands for one image at a time. A session uses the one it stood for when the
//! session first used the name, whatever the name stands for later.

use std::collections::BTreeMap;

use oubliette_protocol::{Error, Result, debug::DebugBody};
use oubliette_sandbox::SandboxError;
use oubliette_store::SessionPatch;

use crate::{agent_plan::AgentPlan, processes::SessionEnv};

/// Makes the image of the plan's sandboxes available, pins it in the session and has the session's sandboxes use it. With a
/// sandbox driver without images it only refuses a plan that names one.
pub(crate) async fn prepare(env: &SessionEnv, plan: &AgentPlan) -> Result<()> {
    let sandbox = &env.deps.sandbox;
    let wanted = plan.image.as_deref();
    if !sandbox.has_images() {
        let none = sandbox.prepare_image(wanted, None, &|_| {}).await;
        return none.map(drop).map_err(image_error);
    }
    let row = env.deps.store.session_get(&env.session).await?;
    let images = row.and_then(|row| row.images);
    let mut images = images.as_deref().and_then(pinned_images).unwrap_or_default();
    // Of the server's default the name is not known here: the driver returns it.
    let pinned = wanted.and_then(|name| images.get(name));
    let agent = plan.agent();
    let progress = |status: String| {
        env.debug.record(
            Some(agent),
            DebugBody::ImageProgress {
                image: wanted.unwrap_or("default").to_owned(),
                status,
            },
        );
    };
    let prepared = sandbox.prepare_image(wanted, pinned.map(String::as_str), &progress);
    let Some(mut image) = prepared.await.map_err(image_error)? else {
        return Ok(());
    };
    match images.get(&image.name) {
        Some(digest) => image.digest.clone_from(digest),
        None => {
            images.insert(image.name.clone(), image.digest.clone());
            let text = serde_json::to_string(&images).map_err(Error::internal)?;
            let patch = SessionPatch {
                images: Some(Some(text)),
                ..SessionPatch::default()
            };
            env.deps.store.session_update(&env.session, patch).await?;
            let (image, digest) = (image.name.clone(), image.digest.clone());
            env.debug
                .record(Some(agent), DebugBody::ImageReady { image, digest });
        }
    }
    env.sandbox_group.set_image(Some(image));
    Ok(())
}

/// The images of a session's row: names, and the digests they stood for.
pub(crate) fn pinned_images(text: &str) -> Option<BTreeMap<String, String>> {
    serde_json::from_str(text).ok()
}

fn image_error(error: SandboxError) -> Error {
    match error {
        SandboxError::Invalid(why) => Error::invalid(why),
        other => Error::unavailable(other.to_string()),
    }
}
