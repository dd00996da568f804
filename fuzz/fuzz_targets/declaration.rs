//! A caller's declaration: one that passes the check has unique names of valid form and length, and its tools
//! check arguments without a panic.
#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;
use oubliette_protocol::caller::{CallerContext, MAX_FULL_NAME, full_name};

fuzz_target!(|bytes: &[u8]| {
    let Ok(context) = serde_json::from_slice::<CallerContext>(bytes) else {
        return;
    };
    let Ok(declaration) = context.check() else { return };
    let mut names = HashSet::new();
    for tool in &declaration.tools {
        let name = full_name(&declaration.caller_id, &tool.name);
        assert!(name.len() <= MAX_FULL_NAME);
        assert!(
            name.bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
        );
        assert!(names.insert(name));
        let _ = tool.check_arguments(&serde_json::json!({}));
        let _ = tool.check_arguments(&tool.input_schema);
    }
});
