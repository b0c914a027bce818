//! Checks documents and sources: the tests that docs/host_api.md and docs/device_api.md name exist,
//! and lines have at most 100 columns.

use std::fs;
use std::path::Path;

/// A Rust source: the stem of its file, and its text.
type Source = (String, String);

/// All Rust sources below a folder.
fn sources(folder: &Path, into: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, into);
        } else if let Some(stem) = name.strip_suffix(".rs") {
            // A test program of several files is known by its folder's name.
            let folder = path.parent().and_then(Path::file_name).unwrap_or_default();
            let stem = if stem == "main" { &folder.to_string_lossy() } else { stem };
            into.push((stem.to_owned(), fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Whether a source has a test of this name: a function, or a name that a macro or a list of trials
/// makes one of.
fn has_test(source: &str, test: &str) -> bool {
    let forms = [
        format!("fn {test}("),
        format!(" {test},"),
        format!(" {test};"),
        format!(" {test}:"),
        format!("({test}:"),
        format!("\"{test}\""),
    ];
    source.contains(test) && forms.iter().any(|form| source.contains(form))
}

/// What the last cells of a document's rows name as tests, a list for each row; heads of tables are
/// left out.
fn named(document: &str) -> Vec<(String, Vec<String>)> {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(document);
    let text = fs::read_to_string(text).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.ends_with("| tests |"));
    let is_test = |name: &&str| {
        let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
        name.chars().all(letters)
    };
    rows.map(|row| {
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        let names = cell.split(", ").filter_map(|name| name.strip_prefix('`')?.strip_suffix('`'));
        (row.to_owned(), names.filter(is_test).map(str::to_owned).collect())
    })
    .collect()
}

fn all_sources() -> Vec<Source> {
    let mut all = Vec::new();
    sources(Path::new(env!("CARGO_MANIFEST_DIR")), &mut all);
    all
}

/// rustfmt leaves comments, strings and macros as they are. Nothing is excluded: `cargo xtask raw`
/// wraps what it generates.
#[test]
fn lines_of_sources_have_at_most_100_columns() {
    let mut long = Vec::new();
    for (stem, text) in all_sources() {
        let lines = text.lines().filter(|line| line.chars().count() > 100);
        long.extend(lines.map(|line| format!("{stem}.rs: {}", line.trim())));
    }
    assert!(long.is_empty(), "wrap these lines:\n{}", long.join("\n"));
}

#[test]
fn every_test_that_the_table_of_the_host_api_names_exists() {
    let sources = all_sources();
    let tests: Vec<String> =
        named("host_api.md").into_iter().flat_map(|(_, tests)| tests).collect();
    for test in &tests {
        assert!(sources.iter().any(|(_, text)| has_test(text, test)), "{test} does not exist");
    }
    assert!(
        tests.len() >= 80,
        "only {} tests were found: did the table's form change?",
        tests.len()
    );
}

#[test]
fn every_row_of_the_device_api_names_tests_that_exist_in_their_files() {
    let sources = all_sources();
    let rows = named("device_api.md");
    for (row, tests) in &rows {
        assert!(!tests.is_empty() || row.contains("| not offered |"), "no test in: {row}");
        for test in tests {
            let (file, name) = test.split_once("::").unwrap_or_else(|| panic!("no file: {test}"));
            let found = |(stem, text): &Source| stem == file && has_test(text, name);
            assert!(sources.iter().any(found), "{test} does not exist");
        }
    }
    assert!(rows.len() >= 70, "only {} rows were found: did the table's form change?", rows.len());
}
