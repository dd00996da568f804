//! Which credentials let a stage in.

use subtle::ConstantTimeEq;
use tokio::sync::Mutex;

use super::StageConnection;
use super::handshake::{ClosedPort, StageCredential, StageHello, VERSION};

/// Which credentials let a stage in.
pub(super) struct StageAdmission {
    stage: String,
    /// The secret of the one-time token, until it is used; then the one of the last welcome.
    secrets: Mutex<StageSecrets>,
    first_token: String,
}

#[derive(Default)]
struct StageSecrets {
    token: Option<String>,
    resume: Option<String>,
}

/// A stage that was let in.
pub(super) struct AdmittedStage {
    pub(super) connection: Box<dyn StageConnection>,
    /// How many numbered frames it has received; none on its first connection.
    pub(super) peer_received: Option<u64>,
    pub(super) secret: String,
    /// What it says of the port that should be closed.
    pub(super) closed_port: Option<ClosedPort>,
}

impl StageAdmission {
    pub(super) fn new(stage: &str) -> Self {
        let secret = new_secret();
        Self {
            stage: stage.to_owned(),
            first_token: format!("{stage}.{secret}"),
            secrets: Mutex::new(StageSecrets {
                token: Some(secret),
                resume: None,
            }),
        }
    }

    /// The stage's name.
    pub(super) fn stage(&self) -> &str {
        &self.stage
    }

    /// The token, as the stage is to get it.
    pub(super) fn token(&self) -> &str {
        &self.first_token
    }

    /// Checks a credential. A token is used up by that.
    pub(super) async fn check(&self, hello: StageHello) -> Result<(Option<u64>, String), &'static str> {
        if hello.version != VERSION {
            return Err("the stage is of another version");
        }
        if hello.stage != self.stage {
            return Err("this is the door of another sandbox");
        }
        let mut secrets = self.secrets.lock().await;
        let is_same = |known: &Option<String>, given: &str| {
            known
                .as_ref()
                .is_some_and(|known| known.as_bytes().ct_eq(given.as_bytes()).into())
        };
        match hello.credential {
            StageCredential::Token(given) if is_same(&secrets.token, &given) => {
                let secret = new_secret();
                secrets.token = None;
                secrets.resume = Some(secret.clone());
                Ok((None, secret))
            }
            StageCredential::Resume { secret, received } if is_same(&secrets.resume, &secret) => {
                Ok((Some(received), secret))
            }
            StageCredential::Token(_) => Err("the token is wrong or was used"),
            StageCredential::Resume { .. } => Err("the secret is wrong"),
        }
    }
}

fn new_secret() -> String {
    hex::encode(rand::random::<[u8; 32]>())
}
