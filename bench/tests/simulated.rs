//! The benchmarks in the simulator: every result is right, and table, CSV and JSON hold what they should.

mod program;

use std::fs;

use program::{refuses, run};
use serde_json::Value;

/// The columns of a comparison.
const COLUMNS: [&str; 14] = [
    "size",
    "count",
    "type",
    "redop",
    "shape",
    "variant",
    "grid",
    "time",
    "algbw",
    "busbw",
    "#wrong",
    "noise",
    "time/nccl",
    "time/nccl-sym",
];

/// A run that ends with 0: its lines of comment, and the words of each row of its table, the columns' names first.
fn table(args: &[&str]) -> (Vec<String>, Vec<Vec<String>>) {
    let (code, stdout, stderr) = run(args);
    assert_eq!(code, Some(0), "{args:?}: {stderr}");
    let lines = stdout.lines().filter(|line| !line.trim().is_empty());
    let (comments, rows): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with('#'));
    let words = |row: &str| row.split_whitespace().map(str::to_owned).collect();
    (comments.into_iter().map(str::to_owned).collect(), rows.into_iter().map(words).collect())
}

/// The run fails when it has begun, and says `words`.
fn refuses_late(args: &[&str], words: &str) {
    let (code, _, stderr) = run(args);
    assert_eq!(code, Some(1), "{args:?}: {stderr}");
    assert!(stderr.contains(words), "{args:?}: {stderr}");
}

#[test]
fn an_all_reduce_is_right_for_every_type_and_size_and_is_not_timed() {
    for ranks in ["1", "2", "3", "4", "8"] {
        let args = ["all-reduce", "--simulate", ranks, "-b", "4", "-e", "16K", "-f", "16"];
        let (comments, rows) = table(&args);
        assert_eq!(rows[0], COLUMNS);
        // Below the units.
        let rows = &rows[2..];
        assert_eq!(rows.len(), 3 * 4, "{rows:?}");
        for row in rows {
            assert_eq!(row[3..6], ["sum", "-", "rust"], "{row:?}");
            assert_eq!(row[7..], ["-", "-", "-", "0", "-", "-", "-"], "{row:?}");
        }
        let column = |i: usize| rows.iter().map(|row| row[i].as_str()).collect::<Vec<_>>();
        assert_eq!(column(0)[..4], ["4", "64", "1024", "16384"]);
        assert_eq!(column(1)[4..8], ["2", "32", "512", "8192"]);
        assert_eq!(column(2)[8..], ["bf16"; 4]);
        let simulated = format!("{ranks} simulated GPUs");
        assert!(comments.iter().any(|line| line.contains(&simulated)), "{comments:?}");
        assert!(comments.iter().any(|line| line.contains("left out: nccl: ")), "{comments:?}");
        assert_eq!(comments.last().unwrap(), "# #wrong 0");
    }
}

#[test]
fn a_barrier_holds_on_every_grid() {
    for (ranks, more) in [("2", &[][..]), ("5", &[]), ("3", &["--blocks", "7", "--threads", "64"])]
    {
        let (comments, rows) = table(&[&["barrier", "--simulate", ranks], more].concat());
        assert_eq!(rows[0], COLUMNS);
        let grids: Vec<&str> = rows[2..].iter().map(|row| row[6].as_str()).collect();
        assert_eq!(grids, if more.is_empty() { vec!["1x128", "4x128"] } else { vec!["7x64"] });
        assert!(rows[2..].iter().all(|row| row[10] == "0"), "{rows:?}");
        assert_eq!(comments.last().unwrap(), "# #wrong 0");
    }
    refuses_late(&["barrier", "--simulate", "4", "--threads", "3"], "3 threads a block");
}

#[test]
fn a_put_arrives_over_the_network_and_over_nvlink() {
    for ranks in ["2", "3", "4"] {
        let args = ["put", "--simulate", ranks, "-b", "1", "-e", "30000", "-f", "31"];
        let (comments, rows) = table(&args);
        let of_sizes: Vec<_> =
            rows[2..].iter().map(|row| (row[0].as_str(), row[5].as_str())).collect();
        assert_eq!(of_sizes.len(), 2 * 4, "{of_sizes:?}");
        assert_eq!(of_sizes[..2], [("1", "rust"), ("1", "rust-lsa")]);
        assert_eq!(of_sizes[6..], [("29791", "rust"), ("29791", "rust-lsa")]);
        assert!(rows[2..].iter().all(|row| row[10] == "0"), "{rows:?}");
        assert_eq!(comments.last().unwrap(), "# #wrong 0");
    }
    refuses_late(&["put", "--simulate", "1"], "two ranks");
}

#[test]
fn a_product_and_its_all_reduce_are_right() {
    let args = ["gemm-allreduce", "--simulate", "2", "--m", "5,130", "--n", "70", "--k", "8,40"];
    let (comments, rows) = table(&args);
    let column = |i: usize| rows[2..].iter().map(|row| row[i].as_str()).collect::<Vec<_>>();
    assert_eq!(column(4), ["5x70x8", "130x70x8", "5x70x40", "130x70x40"]);
    assert_eq!(column(0), ["700", "18200", "700", "18200"]);
    assert_eq!(column(5), ["rust"; 4]);
    assert_eq!(column(10), ["0"; 4]);
    assert_eq!(comments.last().unwrap(), "# #wrong 0");
    refuses_late(&["gemm-allreduce", "--simulate", "2", "--k", "262144"], "would not be exact");
}

#[test]
fn a_size_that_is_no_multiple_of_the_element_is_rounded_down() {
    let args = ["all-reduce", "--simulate", "2", "-b", "5", "-e", "11", "-i", "1", "-d", "float"];
    let (_, rows) = table(&args);
    let sizes: Vec<&str> = rows[2..].iter().map(|row| row[0].as_str()).collect();
    assert_eq!(sizes, ["4", "8"]);
    let args = ["all-reduce", "--simulate", "2", "-b", "1", "-e", "3", "-d", "f32"];
    refuses_late(&args, "no message holds an element of 4 bytes: raise -e");
}

#[test]
fn without_checks_nothing_is_called_right() {
    let args = ["all-reduce", "--simulate", "2", "-e", "8K", "-c", "0", "-d", "half"];
    let (comments, rows) = table(&args);
    assert_eq!(rows[2][10], "N/A");
    assert_eq!(comments.last().unwrap(), "# results were not checked");
}

#[test]
fn csv_and_json_hold_the_rows_of_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (csv, json) = (path("rows.csv"), path("rows.json"));
    let args = ["all-reduce", "--simulate", "2", "-b", "16", "-e", "16", "-d", "bf16"];
    table(&[&args[..], &["--csv", &csv, "--json", &json]].concat());

    let csv = fs::read_to_string(csv).unwrap();
    let expected = "size,count,type,redop,m,n,k,variant,blocks,threads,time_us,algbw,busbw,wrong,noise_percent,time_over_nccl,\
                    time_over_nccl_sym\n16,8,bf16,sum,,,,rust,1,128,,,,0,,,\n";
    assert_eq!(csv, expected);

    let json: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let header = &json["header"];
    assert_eq!((&header["ranks"], &header["lsa_ranks"]), (&Value::from(2), &Value::from(2)));
    assert!(header["machine"].is_null(), "{header}");
    let command: Vec<&str> =
        header["command"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(command[..4], ["devcomm-bench", "all-reduce", "--simulate", "2"]);
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0]["variant"], "rust");
    assert_eq!(rows[0]["type"], "bf16");
    assert_eq!(rows[0]["wrong"], 0);
    assert!(rows[0]["time_us"].is_null(), "{rows:?}");
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let args =
        ["all-reduce", "--simulate", "1", "-e", "8K", "-d", "f32", "--csv", "/no/such/rows.csv"];
    refuses_late(&args, "cannot write /no/such/rows.csv");
}

#[test]
fn a_simulated_rank_is_not_a_launched_one() {
    refuses(&["all-reduce", "--simulate", "2", "--processes"], &["cannot be used with"]);
}
