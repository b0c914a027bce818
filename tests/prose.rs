//! Tests of the sources' readability: how documentation begins, what comments on unsafe code say,
//! and how long documents, files and functions are. [`OWED`] lists the exceptions.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const FIRST: &str = "documentation begins with a preposition or a pronoun";
const VERB: &str = "a public function's documentation begins with no verb in the third person";
const BEHIND: &str = "\"behind\" is said of time";
const SAFETY: &str = "a SAFETY comment names no invariant";
const FILE: &str = "a file has more than 500 lines";
const FUNCTION: &str = "a function has more than 70 lines";

/// Where a rule is still broken, and how often. A number may only fall.
const OWED: [(&str, &str, usize); 9] = [
    ("bench/tests/simulated.rs", FILE, 1),
    ("crates/ops/", FUNCTION, 1),
    ("examples/gemm_ladder/kernels/src/step8_persistent.rs", FUNCTION, 1),
    ("host/src/communicator/group.rs", FUNCTION, 1),
    ("tests/device/kernels/src/barriers_gin.rs", FUNCTION, 1),
    ("tests/gpu_gemm.rs", FILE, 1),
    ("tests/gpu_gemm_allreduce.rs", FILE, 1),
    ("tests/gpu_ops_collectives/exchange.rs", FILE, 1),
    ("tests/gpu_ops_collectives/main.rs", FILE, 1),
];

/// First words after which documentation, which stands alone in rustdoc, has no verb, or a pronoun
/// without a noun.
const BARE: &str = " Of In On At By For From To With Without Within Between Behind Beside After \
    Before Under Over As Like And Or But So Than Until During Through Into Above Below Among It \
    They He She Its Their Them Nothing Something Everything Who Whose That Those None Neither ";

/// Starts of the words for events: work comes after an event, not behind it.
const EVENTS: [&str; 7] = ["call", "operation", "launch", "cop", "kernel", "replay", "wait"];

/// Returns the comment that begins at a line: its lines without `mark`, and the line after them.
fn block<'a>(lines: &[&'a str], from: usize, mark: &str) -> (Vec<&'a str>, usize) {
    let text = |line: &&'a str| line.trim_start().strip_prefix(mark).map(str::trim);
    let block: Vec<&str> = lines[from..].iter().map_while(text).collect();
    let end = from + block.len();
    (block, end)
}

/// Returns the first line of an item, after the attributes that begin at a line.
fn item<'a>(lines: &[&'a str], mut at: usize) -> &'a str {
    while lines.get(at).is_some_and(|line| line.trim_start().starts_with("#[")) {
        at += lines[at..].iter().position(|line| line.ends_with(']')).unwrap_or(0) + 1;
    }
    lines.get(at).map_or("", |line| line.trim_start())
}

fn check_documentation(text: &str, item: &str, found: &mut Vec<&'static str>) {
    let word = text.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    let is_public = ["pub fn ", "pub const fn ", "pub unsafe fn ", "pub const unsafe fn "];
    if !word.is_empty() && BARE.contains(&format!(" {word} ")) {
        found.push(FIRST);
    } else if is_public.iter().any(|start| item.starts_with(start)) && !item.contains("fn $") {
        let is_verb = word.ends_with('s') && word.starts_with(|c: char| c.is_ascii_uppercase());
        if !is_verb {
            found.push(VERB);
        }
    }
}

/// Returns whether a comment names a contract or another comment, and no invariant.
fn says_nothing(safety: &str) -> bool {
    let text = safety.trim().trim_end_matches('.').trim_end_matches(", here and below");
    let is_one_clause = !text.contains([';', ',', ':', '.']) && text.split(' ').count() <= 7;
    let refers = ["contract", "contracts", "promise", "caller's"];
    let begins = ["as ", "the same"].iter().any(|words| text.starts_with(words));
    is_one_clause && (begins || text.split(' ').any(|word| refers.contains(&word)))
}

fn says_behind(comment: &str) -> bool {
    let words: Vec<&str> = comment.split(|c: char| !c.is_alphanumeric()).collect();
    let is_event = |word: &&str| EVENTS.iter().any(|event| word.starts_with(event));
    words.split(|word| *word == "behind").skip(1).any(|after| after.iter().take(4).any(is_event))
}

/// Returns the lines of the function that begins here, if it has a body. The sources are formatted.
fn function_length(lines: &[&str]) -> Option<usize> {
    let code = lines[0].trim_start();
    let indent = &lines[0][..lines[0].len() - code.len()];
    let (before, _) = code.split_once("fn ")?;
    let words = ["pub", "const", "async", "unsafe", "extern", "\"C\""];
    let is_function = before.split_whitespace().all(|word| {
        words.contains(&word) || word.starts_with("pub(") || word.ends_with(')') || word == "in"
    });
    let own = |line: &&str| line.strip_prefix(indent).is_some_and(|rest| !rest.starts_with(' '));
    let own = |line: &&str| own(line) && !line.is_empty();
    let opens = lines.iter().position(|line| own(line) && line.ends_with('{'))?;
    let is_signature =
        |line: &&str| line.trim_start().starts_with([')', '{']) || line.contains("where");
    let is_whole = lines[1..=opens].iter().filter(|line| own(line)).all(is_signature);
    let end = lines.iter().skip(opens + 1).position(|line| own(line) && line.contains('}'))?;
    (is_function && is_whole).then_some(opens + end + 2)
}

/// Returns the rules that a source breaks, by line.
fn violations(source: &str) -> Vec<(usize, &'static str)> {
    let lines: Vec<&str> = source.lines().collect();
    let mut all = Vec::new();
    if lines.len() > 500 {
        all.push((1, FILE));
    }
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at].trim_start();
        let mut found = Vec::new();
        let mut next = at + 1;
        if let Some(mark) = ["///", "//!"].iter().find(|mark| line.starts_with(**mark)) {
            let (text, end) = block(&lines, at, mark);
            check_documentation(text[0], item(&lines, end), &mut found);
            if says_behind(&text.join(" ")) {
                found.push(BEHIND);
            }
            next = end;
        } else if let Some((_, rest)) = line.split_once("// ") {
            let (text, end) = block(&lines, at + 1, "// ");
            let text = format!("{rest} {}", text.join(" "));
            if text.strip_prefix("SAFETY:").is_some_and(says_nothing) {
                found.push(SAFETY);
            }
            if says_behind(&text) {
                found.push(BEHIND);
            }
            next = end;
        } else if function_length(&lines[at..]).is_some_and(|length| length > 70) {
            found.push(FUNCTION);
        }
        all.extend(found.into_iter().map(|rule| (at + 1, rule)));
        at = next;
    }
    all
}

/// Calls `check` with the path and the text of every Rust source that is not generated.
fn each_source(folder: &Path, check: &mut dyn FnMut(&Path, &str)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !path.is_symlink() && name != "target" && !name.starts_with('.') {
            each_source(&path, check);
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(&path).unwrap();
            if !text.contains("@generated by") {
                check(&path, &text);
            }
        }
    }
}

#[test]
fn sources_break_no_rules_but_the_owed_ones() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all: BTreeMap<(String, &str), Vec<String>> = BTreeMap::new();
    each_source(root, &mut |path, text| {
        let path = path.strip_prefix(root).unwrap().to_string_lossy();
        for (line, rule) in violations(text) {
            let owed = OWED.iter().find(|(at, name, _)| path.starts_with(at) && *name == rule);
            let folder = owed.map_or("", |(folder, ..)| folder).to_owned();
            all.entry((folder, rule)).or_default().push(format!("{path}:{line}"));
        }
    });
    let mut report = String::new();
    for ((folder, rule), places) in &all {
        let owed = OWED.iter().find(|(at, name, _)| at == folder && name == rule);
        let allowed = owed.map_or(0, |(.., count)| *count);
        if places.len() > allowed {
            let count = places.len();
            report += &format!("{rule}: {count} in {folder:?}, {allowed} are owed\n");
            report += &format!("  {}\n", places.join("\n  "));
        }
    }
    assert!(report.is_empty(), "{report}");
}

#[test]
fn each_rule_finds_what_breaks_it_and_nothing_else() {
    let rules = |source: &str| -> Vec<&str> {
        violations(source).into_iter().map(|(_, rule)| rule).collect()
    };
    let body = |lines: usize| "    work();\n".repeat(lines);
    let breaks = [
        ("/// Of all rows.\nstruct A;", FIRST),
        ("//! They copy.", FIRST),
        ("/// The rows.\n#[must_use]\npub fn rows() -> u32 {\n}", VERB),
        ("// Recorded behind\n// the last copy.", BEHIND),
        ("// SAFETY: the caller's contract.\nunsafe {}", SAFETY),
        ("let a = b; // SAFETY: as above.", SAFETY),
        (&format!("fn long(\n    a: u32,\n) {{\n{}}}", body(67)), FUNCTION),
        (&"\n".repeat(501), FILE),
    ];
    for (source, rule) in breaks {
        assert_eq!(rules(source), [rule], "{source}");
    }
    let keeps = [
        "/// Returns the rows.\n#[cfg_attr(\n    a,\n    b\n)]\npub fn rows() -> u32 {\n}",
        "/// The rows of C.\nrows: u32,",
        "// It lies behind a pointer.",
        "// SAFETY: the caller passes a window that is open.",
        &format!("fn short() {{\n{}}}\n\nfn other();\n\nstruct B {{\n{0}}}", body(68)),
        &"\n".repeat(500),
    ];
    for source in keeps {
        assert!(rules(source).is_empty(), "{source}: {:?}", rules(source));
    }
}

#[test]
fn documents_are_short() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).unwrap().lines().count();
    assert!(readme <= 150, "README.md has {readme} lines");
    for name in ["docs/design.md", "docs/findings.md"] {
        let size = fs::metadata(root.join(name)).unwrap().len();
        assert!(size <= 30 * 1024, "{name} has {size} bytes");
    }
}
