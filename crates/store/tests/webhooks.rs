//! The outbox of webhooks: what is given up when too much waits.
#![allow(clippy::expect_used, clippy::unwrap_used)]

mod common;

use std::collections::HashSet;

use common::{StoreFixture, delta};
use jiff::{Timestamp, ToSpan as _};
use oubliette_protocol::SessionId;
use oubliette_store::WebhookSubscription;

/// A session that floods a webhook which takes nothing loses its own oldest events, not those of others.
#[tokio::test]
async fn no_session_pushes_the_events_of_others_out() {
    for (flood, max_events, max_bytes) in [(vec![10; 300], 100, u64::MAX), (vec![50_000; 20], 1_000, 300_000)]
    {
        let fixture = StoreFixture::new().await;
        let subscription = WebhookSubscription {
            webhook: "w".into(),
            events: HashSet::from(["delta".to_owned()]),
        };
        fixture.store.webhooks_set(vec![subscription]).await.unwrap();
        let (victim, flooder) = (SessionId::generate(), SessionId::generate());
        let log = fixture.store.events();
        log.append(&victim, vec![delta("first"), delta("second")])
            .await
            .unwrap();
        for bytes in flood {
            log.append(&flooder, vec![delta("x".repeat(bytes))])
                .await
                .unwrap();
        }
        let dropped = fixture
            .store
            .webhook_trim("w", max_events, max_bytes)
            .await
            .unwrap();
        assert!(dropped > 0);
        let status = fixture.store.webhook_status("w").await.unwrap();
        assert!(
            status.waiting <= max_events && status.dropped == dropped,
            "{status:?}"
        );
        let later = Timestamp::now().checked_add(1.hour()).unwrap();
        let due = fixture.store.webhook_due("w", later, later, 64).await.unwrap();
        let first_of = |session: &SessionId| due.iter().find(|event| event.session_id == *session);
        assert_eq!(first_of(&victim).expect("the victim's are kept").index, 0);
        assert!(first_of(&flooder).expect("the newest are kept").index > 0);
    }
}
