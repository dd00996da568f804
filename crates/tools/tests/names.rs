//! Names, aliases, clashes and rules, tested on the registry alone.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{collections::HashSet, sync::Arc};

use oubliette_protocol::{CatalogId, agent::AgentToolSettings, rule_entry::RuleEntry, tool::ToolRule};
use oubliette_tools::{
    CallRules,
    allow::ToolRules,
    name,
    registry::{NameResolution, OfferedTools, RegistryEntry, ToolInfo, ToolRegistry},
};
use proptest::prelude::*;
use serde_json::json;

fn offer(id: &str, tools: &[&str]) -> OfferedTools {
    let info = |name: &&str| {
        Arc::new(ToolInfo {
            name: (*name).into(),
            description: format!("does {name}"),
            input_schema: json!({"type":"object"}).into(),
            note: None,
        })
    };
    OfferedTools {
        id: id.parse().unwrap(),
        down_reason: None,
        tools: tools.iter().map(info).collect(),
    }
}

fn registry(tools: serde_json::Value, offers: &[OfferedTools]) -> ToolRegistry {
    let tools: AgentToolSettings = serde_json::from_value(tools).unwrap();
    let known: HashSet<CatalogId> = ["other".parse().unwrap()].into();
    ToolRegistry::new(&tools, Arc::new(ToolRules::new(&tools)), offers, Arc::new(known))
}

fn tool<'a>(registry: &'a ToolRegistry, called: &'a str) -> &'a RegistryEntry {
    match registry.resolve(called) {
        NameResolution::Tool(entry) => entry,
        other => panic!("{called} is {other:?}"),
    }
}

fn listed(registry: &ToolRegistry) -> Vec<&str> {
    registry.listed().map(|entry| entry.name.as_str()).collect()
}

#[test]
fn alias_resolved() {
    let registry = registry(
        json!({"use":["files"],"aliases":{"read":"@files/read_file"}}),
        &[offer("files", &["read_file", "write.file"])],
    );
    assert_eq!(listed(&registry), ["read", "files_write_file"]);
    for called in ["read", "@files/read_file", "files_read_file"] {
        assert_eq!(&*tool(&registry, called).canonical, "@files/read_file");
    }
    for called in ["@files/write.file", "files_write_file"] {
        assert_eq!(&*tool(&registry, called).canonical, "@files/write.file");
    }
}

#[test]
fn alias_in_allow_list() {
    for allowed in ["read", "@files/read_file", "files_read_file"] {
        let registry = registry(
            json!({"use":["files"],"allowed":[allowed],"aliases":{"read":"@files/read_file"}}),
            &[offer("files", &["read_file", "write_file"])],
        );
        assert_eq!(listed(&registry), ["read"]);
        for called in ["read", "@files/read_file", "files_read_file"] {
            assert!(tool(&registry, called).rules.verdict.allows());
        }
        assert_eq!(
            tool(&registry, "files_write_file").rules.verdict,
            ToolRule::NotListed
        );
    }
}

#[test]
fn two_aliases_are_one_tool_listed_under_the_first() {
    let registry = registry(
        json!({"use":["files"],"aliases":{"b":"@files/x","a":"@files/x"}}),
        &[offer("files", &["x"])],
    );
    assert_eq!(listed(&registry), ["b"]);
    assert_eq!(tool(&registry, "a").canonical, tool(&registry, "b").canonical);
    assert_eq!(tool(&registry, "a").row().aliases, ["a", "files_x"]);
}

#[test]
fn an_alias_to_nothing_is_unavailable_with_a_reason() {
    let missing = registry(
        json!({"use":["files"],"aliases":{"read":"@files/none"}}),
        &[offer("files", &["x"])],
    );
    let row = tool(&missing, "read").row();
    assert!(!row.available && row.reason.to_string().contains("files has no tool"));
    assert_eq!(listed(&missing), ["files_x"]);

    let down = OfferedTools {
        down_reason: Some("it exited".into()),
        ..offer("files", &[])
    };
    let unknown = registry(json!({"use":["files"],"aliases":{"read":"@files/x"}}), &[down]);
    let row = tool(&unknown, "read").row();
    assert!(!row.available && row.reason.to_string().contains("it exited"));
}

#[test]
fn of_two_with_one_name_the_later_in_use_order_is_unavailable() {
    // An alias that shadows a tool's plain name, both ways round.
    let offers = [offer("files", &["read"]), offer("notes", &["x"])];
    let tools = json!({"use":["files","notes"],"aliases":{"files_read":"@notes/x"}});
    let first = registry(tools.clone(), &offers);
    assert_eq!(listed(&first), ["files_read"]);
    assert_eq!(&*tool(&first, "files_read").canonical, "@files/read");
    let loser = tool(&first, "@notes/x").row();
    assert!(!loser.available && loser.reason.to_string().contains("taken by @files/read"));

    let second = registry(tools, &[offers[1].clone(), offers[0].clone()]);
    assert_eq!(&*tool(&second, "files_read").canonical, "@notes/x");
    assert!(
        tool(&second, "@files/read")
            .unavailable()
            .unwrap()
            .contains("taken by @notes/x")
    );

    // Two tools of one server whose plain names are the same.
    let alike = registry(json!({"use":["a"]}), &[offer("a", &["x.y", "x_y", "x_y"])]);
    assert_eq!(listed(&alike), ["a_x_y"]);
    assert_eq!(&*tool(&alike, "a_x_y").canonical, "@a/x.y");
    assert!(tool(&alike, "@a/x_y").unavailable().is_some());
    // An alias gives the second one a name of its own.
    let told = registry(
        json!({"use":["a"],"aliases":{"other":"@a/x_y"}}),
        &[offer("a", &["x.y", "x_y"])],
    );
    assert_eq!(listed(&told), ["a_x_y", "other"]);
}

#[test]
fn a_tool_that_may_not_be_called_takes_no_name() {
    let registry = registry(
        json!({"use":["files","notes"],"denied":["@files/read"],"aliases":{"files_read":"@notes/x"}}),
        &[offer("files", &["read"]), offer("notes", &["x"])],
    );
    assert_eq!(&*tool(&registry, "files_read").canonical, "@notes/x");
    assert!(!tool(&registry, "@files/read").rules.verdict.allows());
}

#[test]
fn oubliettes_own_names_cannot_be_taken() {
    let registry = registry(
        json!({"use":["a"],"aliases":{"session_message":"@a/x","oubliette_y":"@a/y"}}),
        &[offer("a", &["x", "y"])],
    );
    assert!(listed(&registry).is_empty());
    assert!(
        tool(&registry, "@a/x")
            .unavailable()
            .unwrap()
            .contains("base tool")
    );
    assert!(
        tool(&registry, "a_y")
            .unavailable()
            .unwrap()
            .contains("own tools")
    );
    assert!(!registry.contains("session_message") && !registry.contains("oubliette_y"));
}

#[test]
fn a_name_outside_use_is_distinguished_from_an_unknown_one() {
    let registry = registry(
        json!({"use":["files"],"denied":["@files/b*"]}),
        &[offer("files", &["x"])],
    );
    assert!(matches!(
        registry.resolve("@other/x"),
        NameResolution::NotUsed { id: "other" }
    ));
    assert!(matches!(
        registry.resolve("other_x"),
        NameResolution::NotUsed { id: "other" }
    ));
    assert!(matches!(
        registry.resolve("@nowhere/x"),
        NameResolution::NotUsed { .. }
    ));
    assert!(matches!(registry.resolve("nowhere_x"), NameResolution::Unknown));
    assert!(matches!(registry.resolve("x"), NameResolution::Unknown));
    assert!(matches!(
        registry.resolve("@files/y"),
        NameResolution::Missing {
            rules: CallRules {
                verdict: ToolRule::AllOfUse,
                ..
            },
            down_reason: None,
            ..
        }
    ));
    assert!(matches!(
        registry.resolve("@files/by"),
        NameResolution::Missing {
            rules: CallRules {
                verdict: ToolRule::Denied(_),
                ..
            },
            ..
        }
    ));
}

#[test]
fn names_of_ten_thousand_characters_are_bounded() {
    let long = "x".repeat(10_000);
    let registry = registry(json!({"use":["a"]}), &[offer("a", &[&long, "", "ok"])]);
    assert_eq!(listed(&registry), ["a_ok"]);
    assert!(
        registry
            .entries()
            .iter()
            .all(|entry| entry.name.len() <= name::MAX_CALLED_NAME)
    );
    for called in [
        long.clone(),
        format!("@a/{long}"),
        format!("a_{long}"),
        "@".repeat(10_000),
    ] {
        assert!(matches!(registry.resolve(&called), NameResolution::Unknown));
    }
}

#[test]
fn ten_thousand_tools_with_ten_thousand_rules() {
    let names: Vec<String> = (0..10_000).map(|i| format!("tool.{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let denied: Vec<String> = (0..10_000).map(|i| format!("@big/tool.{i}0*")).collect();
    let aliases: serde_json::Map<String, serde_json::Value> = (0..1_000)
        .map(|i| (format!("t{i}"), format!("@big/tool.{i}").into()))
        .collect();
    let registry = registry(
        json!({"use":["big"],"denied":denied,"aliases":aliases}),
        &[offer("big", &names)],
    );
    assert_eq!(registry.entries().len(), 10_000);
    assert_eq!(&*tool(&registry, "t999").canonical, "@big/tool.999");
    assert!(!tool(&registry, "big_tool_100").rules.verdict.allows());
    assert!(tool(&registry, "big_tool_9999").rules.verdict.allows());
}

#[test]
fn ten_thousand_servers_with_ten_thousand_aliases() {
    let ids: Vec<String> = (0..10_000).map(|i| format!("s{i}")).collect();
    let offers: Vec<OfferedTools> = ids.iter().map(|id| offer(id, &["x"])).collect();
    let aliases: serde_json::Map<String, serde_json::Value> = ids
        .iter()
        .map(|id| (format!("a-{id}"), format!("@{id}/none").into()))
        .collect();
    let registry = registry(json!({"use":ids,"aliases":aliases}), &offers);
    assert_eq!(registry.entries().len(), 20_000);
    assert_eq!(&*tool(&registry, "s9999_x").canonical, "@s9999/x");
    assert!(tool(&registry, "a-s9999").unavailable().is_some());
}

/// An agent and what its servers offer, made so that names clash often.
fn agent_and_offers() -> impl Strategy<Value = (AgentToolSettings, Vec<OfferedTools>)> {
    let id = prop::sample::select(vec!["a", "b", "c"]);
    let tool = prop::sample::select(vec!["x", "x.y", "x_y", "y", "z"]);
    let canonical = (id.clone(), tool.clone()).prop_map(|(id, tool)| format!("@{id}/{tool}"));
    let alias = prop::sample::select(vec!["r", "s", "a_x", "b_x_y", "session_message"]);
    let names = prop_oneof![
        canonical.clone(),
        (id.clone(), tool.clone()).prop_map(|(id, tool)| name::plain(&id.parse().unwrap(), tool)),
        alias.clone().prop_map(str::to_owned),
        id.clone().prop_map(|id| format!("@{id}/*")),
    ];
    let denied = prop_oneof![names.clone(), Just("*y".to_owned()), Just("a_*".to_owned())];
    let offers = prop::collection::vec((id, prop::collection::vec(tool, 0..5), any::<bool>()), 0..4);
    (
        prop::collection::vec(names, 0..4),
        prop::collection::vec(denied, 0..3),
        prop::collection::vec((alias, canonical), 0..4),
        offers,
    )
        .prop_map(|(allowed, denied, aliases, offers)| {
            let mut seen = HashSet::new();
            let offers: Vec<OfferedTools> = offers
                .into_iter()
                .filter(|(id, ..)| seen.insert(*id))
                .map(|(id, tools, down)| OfferedTools {
                    down_reason: down.then(|| "down".into()),
                    ..offer(id, &tools)
                })
                .collect();
            let tools = AgentToolSettings {
                uses: offers.iter().map(|offer| offer.id.clone()).collect(),
                allowed: entries(allowed),
                denied: entries(denied),
                ask: Vec::new(),
                aliases: aliases.into_iter().map(|(a, t)| (a.to_owned(), t)).collect(),
            };
            (tools, offers)
        })
}

fn entries(patterns: Vec<String>) -> Vec<RuleEntry> {
    patterns.iter().map(|pattern| pattern.as_str().into()).collect()
}

fn build_registry(tools: &AgentToolSettings, offers: &[OfferedTools]) -> ToolRegistry {
    ToolRegistry::new(tools, Arc::new(ToolRules::new(tools)), offers, Arc::default())
}

proptest! {
    #[test]
    fn an_alias_means_its_target((tools, offers) in agent_and_offers()) {
        let registry = build_registry(&tools, &offers);
        for entry in registry.listed() {
            for called in entry.aliases.iter().map(String::as_str).chain([&*entry.canonical, &entry.name]) {
                if let NameResolution::Tool(found) = registry.resolve(called) {
                    // A second alias may be another tool's listed name; the first and the canonical never are.
                    let own = called == entry.name || called.starts_with('@');
                    prop_assert!(!own || found.canonical == entry.canonical, "{called}");
                } else {
                    prop_assert!(name::reserved_for(called).is_some(), "{called} is lost");
                }
            }
        }
    }

    #[test]
    fn listed_names_are_unique_and_spellable((tools, offers) in agent_and_offers()) {
        let registry = build_registry(&tools, &offers);
        let mut seen = HashSet::new();
        for entry in registry.listed() {
            prop_assert!(seen.insert(entry.name.clone()), "{} twice", entry.name);
            prop_assert!(entry.name.bytes().all(oubliette_protocol::agent::is_tool_name_byte));
            prop_assert!(name::reserved_for(&entry.name).is_none());
        }
    }

    #[test]
    fn denied_always_wins((tools, offers) in agent_and_offers()) {
        let registry = build_registry(&tools, &offers);
        for entry in registry.entries() {
            let mut names = entry.aliases.iter().chain([&entry.plain]).map(String::as_str).chain([&*entry.canonical]);
            let denied = names.any(|name| tools.denied.iter().any(|p| oubliette_tools::pattern_list::glob_matches(&p.tool, name)));
            prop_assert_eq!(denied, matches!(entry.rules.verdict, ToolRule::Denied(_)));
        }
    }

    #[test]
    fn what_is_allowed_is_closed_under_alias((tools, offers) in agent_and_offers()) {
        let registry = build_registry(&tools, &offers);
        // Naming the canonical name of every allowed alias as well changes nothing, and the other way round.
        let mut wider = tools.clone();
        for (alias, target) in &tools.aliases {
            if tools.allowed.iter().any(|entry| entry.tool == *alias) {
                wider.allowed.push(target.as_str().into());
            } else if tools.allowed.iter().any(|entry| entry.tool == *target) {
                wider.allowed.push(alias.as_str().into());
            }
        }
        let again = build_registry(&wider, &offers);
        let allowed = |r: &ToolRegistry| r.entries().iter().map(|e| e.rules.verdict.allows()).collect::<Vec<_>>();
        prop_assert_eq!(allowed(&registry), allowed(&again));
    }

    #[test]
    fn any_name_is_answered(called in ".{0,300}", (tools, offers) in agent_and_offers()) {
        let registry = build_registry(&tools, &offers);
        if let NameResolution::Tool(entry) = registry.resolve(&called) {
            prop_assert!(called == *entry.canonical || called == entry.plain || entry.aliases.contains(&called));
        }
    }
}

#[test]
fn a_name_is_shown_only_by_the_tool_it_means() {
    let tools = json!({"use":["notes","echo"],"aliases":{"a":"@notes/add","notes_slow":"@notes/add","echo_x":"@notes/die"}});
    let registry = registry(
        tools,
        &[offer("notes", &["add", "slow", "die"]), offer("echo", &["x"])],
    );
    let row = |canonical: &str| {
        let entry = registry.entries().iter().find(|e| &*e.canonical == canonical);
        entry.unwrap().row()
    };
    let add = row("@notes/add");
    assert_eq!(add.aliases, ["notes_add"]);
    let reason = add.reason.to_string();
    assert!(reason.contains("note: notes_slow means @notes/slow"), "{reason}");
    assert!(row("@notes/slow").available);
    let x = row("@echo/x");
    assert!(!x.available && x.reason.to_string().contains("taken by @notes/die"));
    for (name, means) in [
        ("notes_slow", "@notes/slow"),
        ("echo_x", "@notes/die"),
        ("a", "@notes/add"),
    ] {
        assert!(
            matches!(registry.resolve(name), NameResolution::Tool(entry) if &*entry.canonical == means),
            "{name}"
        );
    }
}

#[test]
fn a_corrected_tool_has_a_note() {
    let mut lying = offer("srv", &["x"]);
    let mut info = ToolInfo::clone(&lying.tools[0]);
    info.note = Some("its schema is replaced".into());
    lying.tools = [Arc::new(info)].into();
    let registry = registry(json!({"use":["srv"]}), &[lying]);
    let row = registry.entries()[0].row();
    assert!(row.available);
    assert!(row.reason.to_string().ends_with("; note: its schema is replaced"));
}
