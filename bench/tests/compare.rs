//! Comparisons of two runs.

mod program;

use std::fs;

use program::{refuses, run};
use serde_json::{Value, json};

/// Returns a run of two variants with two sizes, 25 rounds, and this noise and factor of all times.
fn rows(noise_percent: f64, factor: f64) -> Value {
    let row = |variant: &str, size: usize, us: f64| {
        json!({
            "size": size, "count": size / 4, "type": "f32", "redop": "sum", "variant": variant,
            "time_us": us * factor, "algbw": 1.0, "busbw": 1.0, "wrong": 0,
            "noise_percent": noise_percent,
        })
    };
    let rows = [("rust", 2.0), ("nccl", 4.0)]
        .into_iter()
        .flat_map(|(variant, us)| [row(variant, 1024, us), row(variant, 4096, 2.0 * us)]);
    let command = ["devcomm-bench", "all-reduce", "-G", "1", "--rounds", "25"];
    let header = json!({"command": command, "ranks": 2, "lsa_ranks": 2, "machine": null});
    json!({"header": header, "rows": rows.collect::<Vec<_>>()})
}

/// Returns the path of a file with this text in a folder.
fn file(folder: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_verdict_knows_the_noise_and_a_slower_row_fails() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, rows: &Value| file(&folder, name, &rows.to_string());
    // With 25 rounds, three standard errors of a difference are 0.79 times the noise of both.
    let old = file("old.json", &rows(2.0, 1.0));
    for (noise, factor, code, words) in [
        (6.0, 1.034, 0, ["+3.4", "4 rows: 0 faster, 4 the same, 0 slower"]),
        (4.0, 1.034, 1, ["+3.4", "4 rows: 0 faster, 0 the same, 4 slower"]),
        // One start of the program does not decide a difference below 3 %.
        (0.1, 1.028, 0, ["+2.8", "4 rows: 0 faster, 4 the same, 0 slower"]),
        (2.0, 0.9, 0, ["-10.0", "4 rows: 4 faster, 0 the same, 0 slower"]),
    ] {
        let new = file("new.json", &rows(noise, factor));
        let (status, stdout, stderr) = run(&["compare", &old, &new]);
        assert_eq!(status, Some(code), "{stdout}{stderr}");
        assert!(words.iter().all(|word| stdout.contains(word)), "{stdout}");
        assert_eq!(stderr.contains("4 of 4 rows became slower"), code == 1, "{stderr}");
    }
    // Three starts of both decide it, unless one of them contradicts the others.
    file("old-start2.json", &rows(2.0, 1.001));
    file("old-start3.json", &rows(2.0, 0.999));
    for (factors, code, words) in [
        ([1.01, 1.012, 1.005], 1, "+1.0"),
        ([1.01, 1.012, 1.0005], 0, "4 rows: 0 faster, 4 the same, 0 slower"),
    ] {
        let new = file("three.json", &rows(2.0, factors[0]));
        file("three-start2.json", &rows(2.0, factors[1]));
        file("three-start3.json", &rows(2.0, factors[2]));
        let (status, stdout, stderr) = run(&["compare", &old, &new]);
        assert_eq!(status, Some(code), "{stdout}{stderr}");
        assert!(stdout.contains(words), "{stdout}");
    }
    // The numbers of starts may have gaps, as in `report`.
    let (three, renamed) = (folder.path().join("three-start3.json"), "three-start7.json");
    fs::rename(three, folder.path().join(renamed)).unwrap();
    let (_, stdout, _) =
        run(&["compare", &old, &folder.path().join("three.json").display().to_string()]);
    assert!(stdout.contains("0 slower (in all starts)"), "{stdout}");
    let mut fewer = rows(0.0, 1.005);
    fewer["rows"].as_array_mut().unwrap().pop();
    fewer["rows"][0]["count"] = json!(7);
    let (_, stdout, _) = run(&["compare", &old, &file("fewer.json", &fewer)]);
    assert!(stdout.contains("2 rows only in the old run, 1 only in the new one"), "{stdout}");
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let good = file(&folder, "good.json", &rows(1.0, 1.0).to_string());
    let changed = |name: &str, pointer: &str, value: Value| {
        let mut rows = rows(1.0, 1.0);
        *rows.pointer_mut(pointer).unwrap() = value;
        file(&folder, name, &rows.to_string())
    };
    let bad = [
        ("no-such-file.json".to_owned(), "cannot read no-such-file.json"),
        (file(&folder, "text.json", "size time"), "is not what --json of this version writes"),
        (changed("other.json", "/rows/0", json!({"kernel": "put"})), "missing field `size`"),
        (changed("variant.json", "/rows/0/variant", json!("cobol")), "unknown variant `cobol`"),
        (changed("empty.json", "/rows", json!([])), "has no rows"),
        (changed("headless.json", "/header", json!(null)), "has no header"),
    ];
    for (path, why) in &bad {
        refuses(&["compare", &good, path], &[why]);
        refuses(&["compare", path, &good], &[why]);
    }
    for (pointer, value, why) in [
        ("/header/command/1", json!("barrier"), "all-reduce and barrier cannot be compared"),
        ("/header/command/3", json!("0"), "plain launches and graphs (-G) cannot be compared"),
        ("/header/command/4", json!("--host"), "runs with different --host cannot be compared"),
        ("/header/command/4", json!("--both"), "runs with different --both cannot be compared"),
        ("/header/command/5", json!("--routing=one"), "cannot be compared: `` and `--routing one`"),
        ("/header/ranks", json!(4), "2 and 4 ranks cannot be compared"),
    ] {
        refuses(&["compare", &good, &changed("changed.json", pointer, value)], &[why]);
    }
    let mut untimed = rows(1.0, 1.0);
    for row in untimed["rows"].as_array_mut().unwrap() {
        row["time_us"] = json!(null);
    }
    let untimed = file(&folder, "untimed.json", &untimed.to_string());
    refuses(&["compare", &good, &untimed], &["no row has a time in both runs"]);
}

/// Returns a run of these rows: bytes, microseconds and further columns.
fn cases(command: &str, rows: &[(usize, f64, Value)]) -> Value {
    let mut run = self::rows(0.0, 1.0);
    let template = run["rows"][0].clone();
    run["header"]["command"] = command.split(' ').collect();
    let row = |(size, us, more): &(usize, f64, Value)| {
        let mut row = template.clone();
        (row["size"], row["time_us"]) = (json!(size), json!(us));
        row.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        row
    };
    run["rows"] = rows.iter().map(row).collect();
    run
}

#[test]
fn each_row_is_compared_with_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let compare = |command: &str, old: &[(usize, f64, Value)], new: &[(usize, f64, Value)]| {
        let [old, new] = [("old.json", old), ("new.json", new)]
            .map(|(name, rows)| file(&folder, name, &cases(command, rows).to_string()));
        run(&["compare", &old, &new])
    };
    // Two tokens of 4096 elements are as long as one of 8192.
    let row = |tokens, us| (16384, us, json!({"tokens": tokens, "hidden": 8192 / tokens}));
    let rows = |slower| [row(2, 1.0), row(1, slower)];
    let (code, stdout, stderr) = compare("b rmsnorm-allreduce", &rows(1.0), &rows(2.0));
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    assert!(stdout.contains("2 rows: 0 faster, 1 the same, 1 slower"), "{stdout}");
    assert!(stdout.contains(" 2x4096 ") && stdout.contains(" 1x8192 "), "{stdout}");
    // Plans that were asked for tell rows apart, in any order; without them nothing does.
    let plan = |name, us| (8, us, json!({"asked": name, "m": 8, "n": 8, "k": 8}));
    let (old, new) = ([plan("a", 1.0), plan("b", 2.0)], [plan("b", 2.0), plan("a", 1.0)]);
    let (_, stdout, _) = compare("b gemm --plan a,b", &old, &new);
    assert!(stdout.contains("2 rows: 0 faster, 2 the same, 0 slower"), "{stdout}");
    let alike = [plan("a", 1.0), plan("a", 2.0), plan("b", 1.0)];
    let (_, stdout, _) = compare("b gemm --plan a,b", &alike, &alike);
    assert!(stdout.contains("# 2 rows are not compared, as a run has several"), "{stdout}");
    assert!(stdout.contains("1 rows: 0 faster, 1 the same, 0 slower"), "{stdout}");
}

#[test]
fn wrong_results_of_either_run_fail_and_other_flags_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let good = file(&folder, "good.json", &rows(1.0, 1.0).to_string());
    let mut wrong = rows(1.0, 1.0);
    wrong["rows"][0]["wrong"] = json!(3);
    wrong["header"]["command"] = json!(["b", "all-reduce", "-G", "1", "-n", "7"]);
    let wrong = file(&folder, "wrong.json", &wrong.to_string());
    for files in [[&good, &wrong], [&wrong, &good]] {
        let (code, stdout, stderr) = run(&["compare", files[0], files[1]]);
        assert_eq!(code, Some(1), "{stdout}");
        assert!(stderr.contains("3 elements are wrong"), "{stderr}");
        assert!(stdout.contains("# flags: -G 1 "), "{stdout}");
    }
}

#[test]
fn only_runs_that_ended_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let good = file(&folder, "good.json", &rows(1.0, 1.0).to_string());
    let mut first = rows(1.0, 1.0);
    first["is_complete"] = json!(false);
    let first = file(&folder, "first.json", &first.to_string());
    refuses(&["compare", &good, &first], &["first.json is of a run that did not end"]);
    refuses(&["model", &first], &["first.json is of a run that did not end"]);
    let (code, stdout, _) = run(&["rows", &first]);
    assert_eq!(code, Some(0));
    assert!(stdout.contains("# the run did not end: these are its first rows"), "{stdout}");
}
