//! A caller's declaration: what passes has unique names of legal form and length, and takes or refuses
//! arguments without a panic.
#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;
use oubliette_protocol::caller::{Context, MAX_NAME, full_name};

fuzz_target!(|bytes: &[u8]| {
    let Ok(context) = serde_json::from_slice::<Context>(bytes) else {
        return;
    };
    let Ok(declaration) = context.check() else { return };
    let mut names = HashSet::new();
    for tool in &declaration.tools {
        let name = full_name(&declaration.caller_id, &tool.name);
        assert!(name.len() <= MAX_NAME);
        assert!(
            name.bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
        );
        assert!(names.insert(name));
        let _ = tool.check_arguments(&serde_json::json!({}));
        let _ = tool.check_arguments(&tool.input_schema);
    }
});
