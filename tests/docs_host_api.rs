//! The tables of docs/host_api.md name tests: each of them exists.

use std::fs;
use std::path::Path;

/// All Rust sources of the repository in one text.
fn sources(folder: &Path, into: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, into);
        } else if name.ends_with(".rs") && name != "docs_host_api.rs" {
            into.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn every_test_that_the_table_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut code = String::new();
    for folder in ["crates", "host", "tests"] {
        sources(&root.join(folder), &mut code);
    }
    let table = fs::read_to_string(root.join("docs/host_api.md")).unwrap();
    let mut named = 0;
    for row in table.lines().filter(|line| line.starts_with("| ")) {
        // The last cell but one of a row is the last text between bars.
        let Some(tests) = row.trim_end_matches(" |").rsplit(" | ").next() else { continue };
        for test in tests.split(", ") {
            let Some(test) = test.strip_prefix('`').and_then(|test| test.strip_suffix('`')) else {
                continue;
            };
            if test.contains(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))
            {
                continue;
            }
            // A function, or a name that a macro makes one of.
            let found = [format!("fn {test}("), format!(" {test},"), format!(" {test};")];
            assert!(found.iter().any(|name| code.contains(name)), "{test} does not exist");
            named += 1;
        }
    }
    assert!(named >= 80, "only {named} tests were found in the table: did its form change?");
}
