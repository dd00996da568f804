//! What this server may do in its namespace.

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client, Error};

use super::sandbox_object::ObjectKind;

/// A right that sandboxes need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AccessRight {
    group: &'static str,
    /// A resource, or a resource and its subresource.
    resource: &'static str,
    verb: &'static str,
}

impl std::fmt::Display for AccessRight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)
    }
}

/// The rights without which no sandbox starts or is followed.
pub(super) fn needed(kind: ObjectKind) -> Vec<AccessRight> {
    let of = |group, resource, verbs: &[&'static str]| {
        let right = |verb: &&'static str| AccessRight {
            group,
            resource,
            verb,
        };
        verbs.iter().map(right).collect::<Vec<_>>()
    };
    let mut rights = of("", "pods", &["get", "list", "watch", "delete"]);
    match kind {
        ObjectKind::Pod => rights.extend(of("", "pods", &["create"])),
        ObjectKind::Sandbox => rights.extend(of(
            "agents.x-k8s.io",
            "sandboxes",
            &["create", "get", "list", "delete"],
        )),
    }
    rights.extend(of(
        "networking.k8s.io",
        "networkpolicies",
        &["get", "create", "patch"],
    ));
    rights
}

/// The rights without which errors say less.
pub(super) fn useful() -> Vec<AccessRight> {
    let right = |resource, verb| AccessRight {
        group: "",
        resource,
        verb,
    };
    vec![
        right("pods/log", "get"),
        right("events", "list"),
        right("persistentvolumeclaims", "get"),
    ]
}

/// Those of the rights that this server does not have.
pub(super) async fn missing(
    client: &Client,
    namespace: &str,
    rights: &[AccessRight],
) -> Result<Vec<AccessRight>, Error> {
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let ask = |right: &AccessRight| {
        let (resource, subresource) = match right.resource.split_once('/') {
            Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
            None => (right.resource, None),
        };
        let review = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(ResourceAttributes {
                    group: Some(right.group.to_owned()),
                    namespace: Some(namespace.to_owned()),
                    resource: Some(resource.to_owned()),
                    subresource,
                    verb: Some(right.verb.to_owned()),
                    ..ResourceAttributes::default()
                }),
                non_resource_attributes: None,
            },
            ..SelfSubjectAccessReview::default()
        };
        let (reviews, right) = (reviews.clone(), *right);
        async move {
            let answered = reviews.create(&PostParams::default(), &review).await?;
            let allowed = answered.status.is_some_and(|status| status.allowed);
            Ok::<_, Error>((!allowed).then_some(right))
        }
    };
    let answers = futures::future::try_join_all(rights.iter().map(ask)).await?;
    Ok(answers.into_iter().flatten().collect())
}
