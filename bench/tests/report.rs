//! The page of measurements, and the figures of other documents that follow from the same files.

mod program;

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use program::{refuses, run};
use serde_json::{Value, json};

/// Returns the folder of the project.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Writes a file of rows: each has a variant, a size, microseconds and further columns.
fn write(folder: &Path, name: &str, command: &str, rows: &[(&str, usize, f64, Value)]) {
    let row = |(variant, size, us, more): &(&str, usize, f64, Value)| {
        let mut row = json!({
            "size": size, "count": size / 4, "type": "f32", "redop": "sum", "variant": variant,
            "time_us": us, "wrong": 0,
        });
        row.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        row
    };
    let command: Vec<&str> = ["devcomm-bench"].into_iter().chain(command.split(' ')).collect();
    let header = json!({"command": command, "ranks": 2, "lsa_ranks": 2, "machine": null});
    let text = json!({"header": header, "rows": rows.iter().map(row).collect::<Vec<_>>()});
    fs::write(folder.join(name), text.to_string()).unwrap();
}

/// Returns the lines of the page of a folder that have a table's row, and the page.
fn page(folder: &Path) -> (Vec<String>, String) {
    let page = folder.join("page.md");
    let (from, to) = (folder.join("rows"), page.to_str().unwrap());
    let (code, stdout, stderr) = run(&["report", "--from", from.to_str().unwrap(), "--to", to]);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    let page = fs::read_to_string(page).unwrap();
    let lines = page.lines().filter(|line| line.contains("[rows]"));
    (lines.map(|line| line.split(" | [rows]").next().unwrap().to_owned()).collect(), page)
}

#[test]
fn the_page_has_a_line_for_each_run_and_plan() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows");
    fs::create_dir(&rows).unwrap();
    let none = json!({});
    let sizes = [("rust", 1.0), ("rust-ops", 2.0), ("nccl", 8.0), ("nccl-sym", 4.0)];
    let sizes = sizes.map(|(variant, us)| (variant, 3 << 20, us, none.clone()));
    let slower = [("rust-ops", 12, 2.02, none.clone()), ("nccl", 12, 2.0, none.clone())];
    let all = [&sizes[..], &slower].concat();
    write(&rows, "sizes.json", "all-reduce -e 3M -g 2 --json sizes.json -G 1", &all);
    let grid = |blocks| json!({"blocks": blocks, "threads": 128});
    let barriers = [
        ("rust", 0, 1.5, grid(1)),
        ("nccl", 0, 6.0, none.clone()),
        ("rust", 0, 2.0, grid(16)),
        ("nccl", 0, 5.0, none.clone()),
    ];
    write(&rows, "barriers.json", "barrier", &barriers);
    let product = |plan| json!({"m": 8, "n": 8, "k": 8, "asked": plan});
    let plans = [
        ("rust", 256, 2.0, product("wide")),
        ("rust", 256, 6.0, product("strips")),
        ("rust-unfused", 256, 1.0, product("")),
        ("nccl", 256, 4.0, product("")),
    ];
    write(&rows, "plans.json", "gemm-allreduce --plan wide,strips", &plans);
    write(&rows, "alone.json", "gemm --m 8", &[("rust", 256, 2.0, product("wide"))]);
    let twin =
        |variant, us, wrong| (variant, 8192, us, json!({"redop": "gin_put", "wrong": wrong}));
    // A variant that is in no ratio need not be checked.
    let twins = [twin("rust", 4.4, json!(0)), twin("cpp", 4.0, json!(0))];
    let twins = [&twins[..], &[twin("cpp-again", 4.0, json!(null))]].concat();
    write(&rows, "twins.json", "twins", &twins);
    let uneven = |variant, us| (variant, 8, us, json!({"wrong": null}));
    let uneven = [uneven("rust-ops", 1.0), uneven("nccl", 2.0)];
    write(&rows, "uneven.json", "all-to-all-v -b 8 -c 0", &uneven);
    let (lines, page) = page(folder.path());
    // Means are geometric: 0.711 is the root of 2.0 / 4.0 times 2.02 / 2.0, and 0.316 that of
    // 1.5 / 6.0 times 2.0 / 5.0.
    let expected = [
        "| 2 simulated GPUs | graphs | f32 | `-e 3M` | 2 | 0.711 | 1.010 (12) | 1 | 1",
        "| 2 simulated GPUs | plain | f32 | `-b 8` (not checked) | 1 | 0.500 | 0.500 (8) | 0 | 0",
        "| 2 simulated GPUs | plain | f32 |  | 2 | 0.316 | 0.400 (16x128) | 0 | 0",
        "| 2 simulated GPUs | plain | f32 | `--m 8` | - | - | - | - | -",
        "| 2 simulated GPUs | plain | f32 | `--plan wide,strips`: wide | 1 | 0.500 | 0.500 (8x8x8) \
         | 0 | 0",
        "| 2 simulated GPUs | plain | f32 | `--plan wide,strips`: strips | 1 | 1.500 | 1.500 \
         (8x8x8) | 1 | 0",
        "| 2 simulated GPUs | plain | f32 |  | 1 | 1.100 | 1.100 (gin_put of 8K) | 1 | 0",
    ];
    assert_eq!(lines, expected);
    assert!(page.contains("## Barrier\n\n| machine |"), "{page}");

    let file = rows.join("sizes.json");
    let (code, stdout, stderr) = run(&["rows", file.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{stderr}");
    for part in [
        "# devcomm-bench all-reduce -e 3M -g 2",
        "# rust-ops over the fastest of nccl, nccl-sym, torch-one-shot, torch-two-shot, \
         flashinfer, vllm, nccl-tests-lsa, nccl-tests-lsa-vector: geometric mean 0.711 of 2 cases",
        "# in no ratio: rust, rust-ops-plain, cpp, rust-gemm\n# #wrong 0",
    ] {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    assert_eq!(stdout.lines().filter(|line| line.contains("rust-ops  ")).count(), 2, "{stdout}");
}

#[test]
fn three_starts_that_agree_decide_what_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows");
    fs::create_dir(&rows).unwrap();
    let start = |name: &str, us: [f64; 2]| {
        let row = |variant, size, us| (variant, size, us, json!({}));
        let ours = [row("rust-ops", 8, us[0]), row("nccl", 8, 1.0)];
        let all = [&ours[..], &[row("rust-ops", 64, us[1]), row("nccl", 64, 1.0)]].concat();
        write(&rows, name, "all-gather -b 8 -e 64", &all);
    };
    start("a.json", [0.98, 0.98]);
    start("a-start2.json", [0.97, 1.01]);
    let figures =
        |(lines, _): (Vec<String>, _)| lines[0].split(" | ").skip(4).collect::<Vec<_>>().join(" ");
    assert_eq!(figures(page(folder.path())), "2 0.985 0.995 (64) 0 2");
    start("a-start3.json", [0.99, 1.02]);
    assert_eq!(figures(page(folder.path())), "2 0.995 1.010 (64) 1 1");
    // A size of two types is two cases.
    let write_types = |name: &str, us: [f64; 2]| {
        let row = |variant, us, dtype| (variant, 8, us, json!({"type": dtype}));
        let first = [row("rust-ops", us[0], "f32"), row("nccl", 1.0, "f32")];
        let second = [row("rust-ops", us[1], "bf16"), row("nccl", 1.0, "bf16")];
        write(&rows, name, "all-reduce", &[first, second].concat());
    };
    write_types("c.json", [0.5, 0.98]);
    write_types("c-start2.json", [0.5, 0.97]);
    write_types("c-start3.json", [0.5, 0.96]);
    let (lines, _) = page(folder.path());
    assert!(lines[0].ends_with("| bf16, f32 |  | 2 | 0.696 | 0.970 (8 bf16) | 0 | 0"), "{lines:?}");
    let (from, to) = (rows.to_str().unwrap(), "/no/such");
    start("b-start2.json", [0.99, 1.02]);
    refuses(&["report", "--from", from, "--to", to], &["b-start2.json", "there is no b.json"]);
    write(&rows, "b.json", "all-gather -b 8", &[("nccl", 8, 1.0, json!({}))]);
    refuses(&["report", "--from", from, "--to", to], &["b-start2.json", "another command"]);
    // Equal flags and cases are not enough.
    fs::remove_file(rows.join("b-start2.json")).unwrap();
    for (name, benchmark) in [("d", "gemm-allreduce"), ("d-start2", "gemm-reduce-scatter")] {
        let row = |variant| (variant, 128, 1.0, json!({"m": 8, "n": 8, "k": 8}));
        let (name, command) = (format!("{name}.json"), format!("{benchmark} --m 8"));
        write(&rows, &name, &command, &[row("rust"), row("nccl")]);
    }
    refuses(&["report", "--from", from, "--to", to], &["d-start2.json", "another command"]);
}

#[test]
fn what_cannot_be_reported_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().to_str().unwrap();
    let refused = |words: &[&str]| refuses(&["report", "--from", from, "--to", "/no/such"], words);
    refuses(&["report", "--from", "/no/such/folder"], &["cannot read /no/such/folder"]);
    refused(&[from, "has no JSON file"]);
    let file = folder.path().join("rows.json");
    let header = |name: &str| {
        let command = format!(r#""command": ["devcomm-bench", "{name}"]"#);
        format!(r#"{{"header": {{{command}, "ranks": 1, "lsa_ranks": 1}}, "rows": []}}"#)
    };
    for (text, word) in [
        ("size,time".to_owned(), "rows.json has no rows of a comparison"),
        (r#"{"header": null, "rows": []}"#.to_owned(), "rows.json has no rows of a comparison"),
        (header("put"), "rows.json has no rows"),
        (header("model"), "rows.json is of `model`, which compares nothing"),
    ] {
        fs::write(&file, text).unwrap();
        refused(&["rows.json", word]);
        refuses(&["rows", file.to_str().unwrap()], &[word]);
    }
    write(folder.path(), "rows.json", "put", &[("rust", 8, 1.0, json!({}))]);
    refused(&["cannot write /no/such"]);
    write(folder.path(), "rows.json", "put", &[("rust", 8, 1.0, json!({"wrong": 5}))]);
    refused(&["rows.json: 5 elements are wrong"]);
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replacen('{', r#"{"is_complete": false, "#, 1)).unwrap();
    refused(&["rows.json is of a run that did not end"]);
}

#[test]
fn a_second_program_computes_the_ratios_of_the_page() {
    let name = "a_second_program_computes_the_ratios_of_the_page";
    let mut python = Command::new("python3");
    python.arg(project().join("bench/ratios.py"));
    python.args([project().join("docs/measurements"), project().join("docs/measurements.md")]);
    match python.output() {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(error) => {
            // This is written to stdout, as the test harness would capture `println!`.
            let line = format!("SKIPPED {name}: python3 does not start: {error}");
            let _ = writeln!(std::io::stdout(), "{line}");
        }
    }
}

/// Returns the least times of a file's rows, by size and variant, in us.
fn times_of(name: &str) -> HashMap<(u64, String), f64> {
    let file = project().join(format!("docs/measurements/{name}.json"));
    let file: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let mut times = HashMap::new();
    for row in file["rows"].as_array().unwrap().iter().filter(|row| row["in_place"] != true) {
        let variant = row["variant"].as_str().unwrap().to_owned();
        let least = times.entry((row["size"].as_u64().unwrap(), variant)).or_insert(f64::INFINITY);
        *least = least.min(row["time_us"].as_f64().unwrap());
    }
    times
}

#[test]
fn the_table_of_the_readme_is_that_of_the_files() {
    let readme = fs::read_to_string(project().join("README.md")).unwrap();
    let files = ["all-reduce-2xh200-f32-graph", "all-reduce-4xh200-f32-graph"].map(times_of);
    let lines = readme[readme.find("All-reduces of f32").unwrap()..].lines();
    let table: Vec<&str> = lines
        .skip_while(|line| !line.starts_with("| size"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .collect();
    assert!(table.len() > 5, "{table:?}");
    for line in table {
        let cells: Vec<&str> = line.trim_matches(['|', ' ']).split(" | ").collect();
        let (number, unit) = cells[0].split_once(' ').unwrap();
        let shift = ["KiB", "MiB", "GiB"].iter().position(|name| *name == unit).unwrap();
        let size = number.parse::<u64>().unwrap() << (10 * (shift + 1));
        let expected = files.iter().flat_map(|times| {
            let us = |variant: &str| times[&(size, variant.to_owned())];
            let torch = us("torch-one-shot").min(us("torch-two-shot"));
            [us("rust-ops"), us("nccl"), us("nccl-sym"), torch]
        });
        let digits = |us: f64| if us < 100.0 { 1 } else { 0 };
        let expected: Vec<String> = expected.map(|us| format!("{us:.*}", digits(us))).collect();
        assert_eq!(cells[1..], expected, "{line}");
    }
}
