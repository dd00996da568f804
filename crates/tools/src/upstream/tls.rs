//! TLS as a client, trusting what the host trusts.

use std::sync::Arc;

use rustls::{ClientConfig, crypto::ring};
use rustls_platform_verifier::BuilderVerifierExt;

/// A client configuration. It names its cryptography itself, so that nothing depends on which provider the
/// process has installed.
pub(super) fn client() -> Result<ClientConfig, rustls::Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?;
    Ok(builder.with_platform_verifier()?.with_no_client_auth())
}
