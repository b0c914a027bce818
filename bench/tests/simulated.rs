//! The benchmarks on simulated GPUs: every result is right, and table, CSV and JSON are complete.

mod program;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use devcomm_testing::experts::{Batch, Routing};
use program::{output, program, refuses, run};
use serde_json::Value;

/// The columns of every comparison that is not timed.
const COLUMNS: &str = "size count type redop shape variant grid time algbw busbw #wrong noise";

// The indices of some columns. The column `algorithm` follows those of `COLUMNS`, in some tables.
const SIZE: usize = 0;
const COUNT: usize = 1;
const TYPE: usize = 2;
const REDOP: usize = 3;
const SHAPE: usize = 4;
const VARIANT: usize = 5;
const GRID: usize = 6;
const TIME: usize = 7;
const WRONG: usize = 10;
const ALGORITHM: usize = 12;

/// The variants of `devcomm::Collectives`.
const OF_OPS: [&str; 2] = ["rust-ops", "rust-ops-plain"];

/// NCCL's variants.
const OF_NCCL: [&str; 2] = ["nccl", "nccl-sym"];

/// Returns a successful run in which every result was checked and is right: its comment lines, and
/// the words of each row of its table.
fn table(args: &[&str]) -> (Vec<String>, Vec<Vec<String>>) {
    checked(program(args))
}

/// Returns the rows of such a run.
fn rows_of(args: &[&str]) -> Vec<Vec<String>> {
    table(args).1
}

/// Returns such a run on a simulated machine that the environment names.
fn table_on(machine: &str, args: &[&str]) -> (Vec<String>, Vec<Vec<String>>) {
    let mut command = program(args);
    command.env("DEVCOMM_SIMULATE", machine);
    checked(command)
}

fn checked(command: Command) -> (Vec<String>, Vec<Vec<String>>) {
    let (comments, rows) = parsed(command);
    assert!(rows.iter().all(|row| row[WRONG] == "0"), "{rows:?}");
    assert_eq!(comments.last().unwrap(), "# #wrong 0");
    (comments, rows)
}

fn parsed(command: Command) -> (Vec<String>, Vec<Vec<String>>) {
    let (code, stdout, stderr) = output(command);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    let lines = stdout.lines().filter(|line| !line.trim().is_empty());
    let (comments, rows): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with('#'));
    let words = |row: &str| row.split_whitespace().map(str::to_owned).collect();
    let mut rows: Vec<Vec<String>> = rows.into_iter().map(words).collect();
    let header = rows[0].join(" ");
    let more = header.strip_prefix(COLUMNS).unwrap_or_else(|| panic!("{header}"));
    // A product has a plan, and an operation that chooses has a choice.
    let chooses = rows[2].len() > COLUMNS.split(' ').count();
    assert_eq!(more, if chooses { " algorithm" } else { "" });
    // The heading has two lines: names and units.
    (comments.into_iter().map(str::to_owned).collect(), rows.split_off(2))
}

/// Returns one column.
fn column(rows: &[Vec<String>], i: usize) -> Vec<&str> {
    rows.iter().map(|row| row[i].as_str()).collect()
}

/// Checks that a comment line has these words.
fn has_comment(comments: &[String], words: &str) {
    assert!(comments.iter().any(|line| line.contains(words)), "{comments:?}");
}

/// Returns the path of a file in a folder.
fn path(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).to_str().unwrap().to_owned()
}

/// Returns the content of a JSON file.
fn read_json(path: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Checks that a run fails, perhaps after printing its header, with an error that contains `words`.
fn refuses_late(args: &[&str], words: &str) {
    let (code, _, stderr) = run(args);
    assert_eq!(code, Some(1), "{args:?}: {stderr}");
    assert!(stderr.contains(words), "{args:?}: {stderr}");
}

#[test]
fn operations_of_expert_parallelism_and_their_competitors_are_right() {
    let args = ["ep", "--simulate", "2", "--tokens", "3", "-G", "1"];
    let rows = rows_of(&args);
    let others = ["rust-allgather", "nccl", "nccl-sym", "nccl-alltoall"];
    let with = |operation, more: &[&'static str]| {
        let variants = ["rust", "rust-throughput"].iter().chain(more).copied();
        variants.map(|variant| [operation, variant]).collect::<Vec<_>>()
    };
    let stores = [&others[..], &["write"]].concat();
    let expected = [
        with("dispatch", &stores),
        with("group", &[]),
        with("combine", &stores),
        with("layer", &others),
    ];
    let got: Vec<_> = rows.iter().map(|row| [row[REDOP].as_str(), row[VARIANT].as_str()]).collect();
    assert_eq!(got, expected.concat());
    refuses(&["ep", "--simulate", "2", "--tokens", "0"], &["at least one token"]);
    refuses_late(&["ep", "--simulate", "2", "--experts", "15"], "15 experts on 2 ranks");
}

#[test]
fn an_all_reduce_is_right_for_every_type_and_size_and_is_not_timed() {
    for ranks in ["1", "2", "3", "4", "8"] {
        let args = ["all-reduce", "--simulate", ranks, "-b", "4", "-e", "16K", "-f", "16"];
        let (comments, rows) = table(&[&args[..], &["-d", "all"]].concat());
        let (types, sizes, variants) = (3, 4, 5);
        assert_eq!(rows.len(), types * sizes * variants, "{rows:?}");
        let algorithm = if ["2", "4", "8"].contains(&ranks) { "Lamport" } else { "Nccl" };
        for same_size in rows.chunks(5) {
            assert_eq!(column(same_size, VARIANT), [&["rust"], &OF_OPS[..], &OF_NCCL].concat());
            for row in same_size {
                assert_eq!((&*row[REDOP], &*row[SHAPE]), ("sum", "-"), "{row:?}");
                let chosen = if OF_OPS.contains(&&*row[VARIANT]) { algorithm } else { "-" };
                assert_eq!(row[TIME..], ["-", "-", "-", "0", "-", chosen], "{row:?}");
            }
        }
        let of_rust: Vec<_> = rows.into_iter().step_by(5).collect();
        assert_eq!(column(&of_rust, SIZE)[..4], ["4", "64", "1024", "16384"]);
        assert_eq!(column(&of_rust, COUNT)[4..8], ["2", "32", "512", "8192"]);
        assert_eq!(column(&of_rust, TYPE)[8..], ["bf16"; 4]);
        let simulated = format!("{ranks} simulated GPUs");
        has_comment(&comments, &simulated);
        has_comment(&comments, "left out: cpp: ");
    }
}

#[test]
fn the_other_collectives_are_right_and_count_bytes_as_nccl_tests() {
    for (name, ranks, [smallest, count], algorithm) in [
        ("all-gather", "2", ["8", "1"], "Lamport"),
        ("reduce-scatter", "4", ["16", "1"], "Lamport"),
        ("broadcast", "3", ["8", "2"], "Nccl"),
        ("all-to-all", "4", ["16", "1"], "Lamport"),
        ("all-to-all-v", "2", ["8", "1"], "Lamport"),
        ("all-to-all-v", "3", ["16", "1"], "Nccl"),
    ] {
        let args = [name, "--simulate", ranks, "-b", "4", "-e", "16K", "-f", "2"];
        let rows = rows_of(&args);
        let last = rows.len() - 4;
        assert_eq!(column(&rows[last..], VARIANT), [OF_OPS, OF_NCCL].concat());
        assert_eq!([&*rows[last][SIZE], &*rows[last][ALGORITHM]], ["16384", algorithm]);
        let at = rows.iter().position(|row| row[SIZE] == smallest).unwrap();
        assert_eq!(rows[at][COUNT], count);
    }
    let args = ["all-to-all", "--simulate", "2", "-b", "16K", "-e", "16K", "-d", "f16"];
    let rows = rows_of(&[&args[..], &["--lamport-bytes", "1K"]].concat());
    assert_eq!(column(&rows, ALGORITHM), ["Push", "Nccl", "-", "-"]);
}

#[test]
fn every_reduction_is_right_for_every_type_in_place_and_on_every_communicator() {
    let args = |name| [name, "--simulate", "2", "-b", "64", "-e", "8K", "-f", "128", "--in-place"];
    for (name, op, dtype, own) in [
        ("all-reduce", "max", "bf16", &[][..]),
        ("all-reduce", "avg", "e4m3", &[]),
        ("all-reduce", "sum", "f32", &["rust"]),
        ("reduce-scatter", "min", "i32", &[]),
        ("reduce-scatter", "avg", "i32", &[]),
    ] {
        let more = ["-o", op, "-d", dtype, "--nccl", "mixed,efficiency,ctas:4"];
        let rows = rows_of(&[&args(name)[..], &more].concat());
        assert_eq!((&*rows[0][REDOP], &*rows.last().unwrap()[REDOP]), (op, op));
        let nccl = [["nccl"; 3].as_slice(), &["nccl-sym"; 2]].concat();
        let in_place = [&OF_OPS[..], &nccl].concat();
        let variants = [own, &in_place, &in_place].concat();
        assert_eq!(column(&rows, VARIANT), [&variants[..], &variants].concat());
        let settings = ["-", "efficiency", "ctas:4", "-", "ctas:4"];
        assert_eq!(column(&rows[rows.len() - 5..], ALGORITHM), settings);
    }
    let none = ["--variants", "nccl-sym", "--nccl", "zero"];
    refuses_late(&[&args("all-reduce")[..], &none].concat(), "no variant runs");
    let bad = [&args("all-reduce")[..], &["--nccl", "ctas:0"]].concat();
    refuses(&bad, &["`ctas:0` is not mixed, unmixed"]);
}

#[test]
fn a_collective_is_right_during_a_product_on_another_stream() {
    let args = ["all-gather", "--simulate", "2", "-b", "8K", "-e", "8K", "--beside"];
    for more in [&["-G", "0"][..], &["-G", "1"]] {
        let rows = rows_of(&[&args[..], &["5,72,40"], more].concat());
        assert_eq!(column(&rows, VARIANT), [&OF_OPS[..], &OF_NCCL, &["rust-gemm"]].concat());
    }
    refuses_late(&[&args[..], &["5,72"]].concat(), "--beside [5, 72]: a product has");
}

#[test]
fn a_launch_is_right_with_every_set_of_attributes() {
    let rows = rows_of(&["launch", "--simulate", "2", "--host"]);
    assert_eq!(
        column(&rows, VARIANT),
        ["rust", "rust", "rust", "rust", "rust-ops", OF_NCCL[0], OF_NCCL[1]]
    );
}

#[test]
fn a_barrier_holds_on_every_grid() {
    for (ranks, more) in [("2", &[][..]), ("5", &[]), ("3", &["--blocks", "7", "--threads", "64"])]
    {
        let rows = rows_of(&[&["barrier", "--simulate", ranks], more].concat());
        let grids = if more.is_empty() { &["1x128", "4x128"][..] } else { &["7x64"] };
        let with_nccl: Vec<&str> = grids.iter().flat_map(|grid| [grid, "-", "-"]).collect();
        assert_eq!(column(&rows, GRID), with_nccl);
    }
    refuses_late(&["barrier", "--simulate", "4", "--threads", "3"], "3 threads per block");
}

#[test]
fn a_put_arrives_over_the_network_and_over_nvlink() {
    for ranks in ["2", "3", "4"] {
        let args = ["put", "--simulate", ranks, "-b", "1", "-e", "30000", "-f", "31"];
        let rows = rows_of(&args);
        assert_eq!(rows.len(), 4 * 4, "{rows:?}");
        for (same_size, size) in rows.chunks(4).zip(["1", "31", "961", "29791"]) {
            assert_eq!(column(same_size, SIZE), [size; 4]);
            assert_eq!(column(same_size, VARIANT), ["rust", "rust-lsa", OF_NCCL[0], OF_NCCL[1]]);
        }
    }
    refuses_late(&["put", "--simulate", "1"], "two ranks");
}

#[test]
fn signals_arrive_once_and_in_order() {
    for ranks in ["2", "3"] {
        let rows = rows_of(&["signal", "--simulate", ranks]);
        assert_eq!(column(&rows, VARIANT), ["rust", "rust-lsa", OF_NCCL[0], OF_NCCL[1]]);
    }
    refuses_late(&["signal", "--simulate", "1"], "two ranks");
}

#[test]
fn a_copy_between_two_ranks_arrives_by_every_means() {
    for (ranks, more) in [("2", &[][..]), ("3", &["--both", "--blocks", "1"]), ("4", &["-G", "1"])]
    {
        // 100 bytes are no whole row of TMA's. One block has more tiles than stages.
        let args = ["p2p", "--simulate", ranks, "-b", "100", "-e", "7296", "-i", "7196"];
        let rows = rows_of(&[&args[..], more].concat());
        let by_all = ["read", "write", "tma", "copy-engine", OF_NCCL[0], OF_NCCL[1]];
        assert_eq!(column(&rows[..5], VARIANT), [&by_all[..2], &by_all[3..]].concat());
        assert_eq!(column(&rows[5..], VARIANT), by_all);
    }
}

#[test]
fn an_all_reduce_with_rmsnorm_is_right() {
    for (ranks, more) in [("2", &["-d", "all"][..]), ("3", &["-G", "1", "--tokens", "2"])] {
        let args = ["rmsnorm-allreduce", "--simulate", ranks, "--hidden", "200"];
        let rows = rows_of(&[&args[..], more].concat());
        assert_eq!(column(&rows[..3], VARIANT), ["rust-ops", OF_NCCL[0], OF_NCCL[1]]);
        assert_eq!(column(&rows[..1], COUNT), [if ranks == "2" { "200" } else { "400" }]);
    }
    let args = ["rmsnorm-allreduce", "--simulate", "2", "--quantised", "--hidden", "64,256"];
    let rows = rows_of(&args);
    assert_eq!(
        column(&rows, COUNT).into_iter().step_by(3).collect::<Vec<_>>(),
        ["64", "192", "256", "768"]
    );
    assert_eq!(column(&rows, REDOP), ["quantised"; 12]);
    let args = ["rmsnorm-allreduce", "--simulate", "2", "--hidden"];
    for hidden in ["12", "16400"] {
        refuses_late(&[&args[..], &[hidden]].concat(), &format!("--hidden {hidden} of bf16"));
    }
}

#[test]
fn a_product_and_its_all_reduce_are_right() {
    // Fewer multiprocessors than tiles, so that a block computes several.
    let args = ["gemm-allreduce", "--m", "5,130", "--n", "70,300", "--k", "8,40"];
    let (comments, rows) = table_on("2,multiprocessors=1", &args);
    let shapes = ["5x70x8", "130x70x8", "5x300x8", "130x300x8", "5x70x40", "130x70x40"];
    let fused: Vec<_> = rows.iter().step_by(2).cloned().collect();
    assert_eq!(column(&fused, SHAPE)[..6], shapes);
    assert_eq!(column(&fused, SIZE)[..4], ["700", "18200", "3000", "78000"]);
    assert_eq!(column(&rows, VARIANT), ["rust", "rust-unfused"].repeat(8));
    has_comment(&comments, "left out: nccl: cuBLASLt");
    refuses_late(&["gemm-allreduce", "--simulate", "2", "--k", "262144"], "would not be exact");
}

#[test]
fn a_product_and_its_all_reduce_are_right_by_every_plan() {
    let shape = ["--m", "5", "--n", "72", "--k", "8", "--variants", "rust"];
    let all = ["gemm-allreduce", "--simulate", "2", "--all-plans"];
    let rows = rows_of(&[&all[..], &shape].concat());
    assert_eq!(column(&rows[..2], ALGORITHM), ["strips", "unfused"]);
    assert!(rows.len() > 4, "{rows:?}");
}

#[test]
fn products_take_the_plan_that_was_measured() {
    let args = ["gemm-allreduce", "--simulate", "2", "--m", "9", "--n", "8", "--k", "16"];
    // In f32 there is one plan.
    let asked = ["--wire", "f32", "--plan", "measured", "--variants", "rust"];
    let rows = rows_of(&[&args[..], &asked].concat());
    let how = rows.iter().map(|row| row[ALGORITHM..].join(" ")).collect::<Vec<_>>();
    assert_eq!(how, ["strips in f32"]);
    // Rows of 9 elements are not aligned, so that one plan can do them; else virtual time decides,
    // which means nothing.
    let others: [(_, _, &[&str]); 3] = [
        ("gemm-reduce-scatter", "16", &["unfused"]),
        ("allgather-gemm", "9", &["unfused"]),
        ("allgather-gemm", "16", &["unfused", "fused"]),
    ];
    for (other, k, plans) in others {
        let shape = ["--m", "2", "--n", "9", "--k", k, "--variants", "rust"];
        let (_, rows) =
            table_on("2,multiprocessors=2", &[&[other, "--plan", "measured"][..], &shape].concat());
        let plan = rows[0].last().map(String::as_str);
        assert!(plan.is_some_and(|plan| plans.contains(&plan)), "{rows:?}");
    }
    refuses(&["allgather-gemm", "--plan", "ring"], &["unfused or fused, or measured"]);
}

#[test]
fn a_product_and_its_all_reduce_are_right_with_partial_sums_of_every_type() {
    let args = ["gemm-allreduce", "--simulate", "2", "--m", "70", "--n", "72", "--k", "40"];
    let wires = ["--wire", "bf16,f32,e4m3", "--plan", "strips,wide", "--variants", "rust"];
    let (comments, rows) = table(&[&args[..], &wires].concat());
    let how = rows.iter().map(|row| row[ALGORITHM..].join(" ")).collect::<Vec<_>>();
    let all = ["strips in bf16", "wide in bf16", "strips in f32", "strips in e4m3", "wide in e4m3"];
    assert_eq!(how, all);
    has_comment(&comments, "left out: wide in f32 of [70, 72, 40]");
}

#[test]
fn a_product_and_the_reduce_scatter_of_its_rows_are_right() {
    let args = ["gemm-reduce-scatter", "--m", "8,512", "--n", "40", "--k", "72", "--plan"];
    let (comments, rows) =
        table_on("2,multiprocessors=2", &[&args[..], &["wide,unfused"]].concat());
    assert_eq!(column(&rows, SHAPE), ["8x40x72", "512x40x72", "512x40x72"]);
    assert_eq!(column(&rows, VARIANT), ["rust"; 3]);
    has_comment(&comments, "left out: wide of [8, 40, 72]: as m is no");
    let odd = ["gemm-reduce-scatter", "--simulate", "2", "--m", "7"];
    refuses_late(&odd, "--m 7: 2 ranks share the rows");
}

#[test]
fn a_product_and_the_all_gather_before_it_are_right() {
    let args = ["allgather-gemm", "--m", "260", "--n", "40", "--k", "9,24", "--plan"];
    let (comments, rows) =
        table_on("2,multiprocessors=2", &[&args[..], &["fused,unfused"]].concat());
    let shapes = [["260x40x9"; 2].as_slice(), &["260x40x24"; 3]].concat();
    assert_eq!(column(&rows, SHAPE), shapes);
    assert_eq!(column(&rows, VARIANT), ["rust", "rust-gemm", "rust", "rust", "rust-gemm"]);
    has_comment(&comments, "left out: fused of [260, 40, 9]: as k is no");
    let odd = ["allgather-gemm", "--simulate", "2", "--m", "7"];
    refuses_late(&odd, "--m 7: 2 ranks share the rows");
}

#[test]
fn products_of_groups_are_right_for_every_split_and_run_on_one_gpu() {
    for split in ["even", "random", "skewed", "one"] {
        let args = ["grouped-gemm", "--simulate", "1", "--rows", "3,70", "--split", split];
        let (comments, rows) = table(&args);
        assert_eq!(column(&rows, SHAPE), ["3x72x40", "3x72x40", "70x72x40", "70x72x40"], "{split}");
        assert_eq!(column(&rows, VARIANT), ["rust", "rust-gemm", "rust", "rust-gemm"]);
        has_comment(&comments, "left out: cublaslt");
    }
    refuses(&["grouped-gemm", "--groups", "0"], &["--groups", "at least one"]);
    refuses_late(&["grouped-gemm", "--simulate", "2"], "grouped-gemm runs on one GPU: -g 1");
}

#[test]
fn a_product_alone_is_right_and_runs_on_one_gpu() {
    let args = ["gemm", "--simulate", "1", "--m", "5,130", "--n", "72,264", "--k", "8,72"];
    let (comments, rows) = table(&args);
    assert_eq!(column(&rows, VARIANT), ["rust"; 8]);
    has_comment(&comments, "left out: cublaslt");
    refuses_late(&["gemm", "--simulate", "2"], "gemm runs on one GPU: -g 1");
    refuses(&["gemm", "--set", "odd", "--k", "8"], &["--set", "--k", "cannot be used with"]);
    let args = ["gemm", "--simulate", "1", "--m", "5", "--n", "72", "--k", "8", "--l2", "cold"];
    let folder = tempfile::tempdir().unwrap();
    let json = path(&folder, "rows.json");
    table(&[&args[..], &["-c", "3", "--json", &json]].concat());
    let json = read_json(&json);
    assert_eq!(json["rows"][0]["l2"], "cold");
    // One copy of B per launch of a graph.
    refuses_late(&[&args[..], &["-G", "1", "-n", "1"]].concat(), "needs 2 copies of B");
}

#[test]
fn the_ladders_steps_are_right() {
    // A cluster computes two tiles, and a tile takes more steps than the pipeline has stages.
    let names = ["step6-pipeline", "step7-cluster", "step8-persistent"];
    let args = ["gemm-ladder", "--n", "512", "--k", "320", "--variants", &names.join(",")];
    let (_, rows) = table_on("1,multiprocessors=2", &args);
    assert_eq!(column(&rows, SHAPE), ["256x512x320"; 3]);
    assert_eq!(column(&rows, VARIANT), names);
    refuses_late(&["gemm-ladder", "--simulate", "2"], "gemm-ladder runs on one GPU: -g 1");
}

#[test]
fn a_product_of_any_shape_is_right_and_says_its_plan() {
    let (folder, args) = (tempfile::tempdir().unwrap(), ["gemm", "--simulate", "1", "--m", "5,9"]);
    let json = path(&folder, "rows.json");
    let more = ["--n", "7,72", "--k", "8,13", "--json", &json];
    let (comments, rows) = table(&[&args[..], &more].concat());
    let shapes = ["5x7x8", "9x7x8", "5x72x8", "9x72x8", "5x7x13", "9x7x13", "5x72x13", "9x72x13"];
    assert_eq!(column(&rows, SHAPE), shapes);
    let json = read_json(&json);
    let plan = |i: usize| json["rows"][i]["algorithm"].as_str().unwrap().to_owned();
    let wide = "wide, tile 128x256, cluster 2x1x1, split-K 1";
    let portable = "portable, tile 128x128, cluster 1x1x1, split-K 1";
    assert_eq!([plan(0), plan(4), plan(6)], [wide, portable, portable]);
    assert!(plan(2).starts_with("swapped:8x64:"), "{}", plan(2));
    assert!(comments.contains(&format!("# rust 5x72x8: {}", plan(2))), "{comments:?}");
    assert_eq!(rows[2][ALGORITHM..].join(" "), plan(2));
}

#[test]
fn a_product_of_every_type_is_right_and_names_it() {
    for (dtype, name, plan, more) in [
        ("f16", "f16", "swapped:", &[][..]),
        ("e4m3", "f8e4m3", "wide,", &["--scales", "0.5,8", "-G", "1"]),
        ("e5m2", "f8e5m2", "wide,", &["--l2", "cold", "--variants", "rust"]),
    ] {
        let args = ["gemm", "--simulate", "1", "--m", "5,130", "--n", "72", "--dtype", dtype];
        let rows = rows_of(&[&args[..], more].concat());
        assert_eq!(column(&rows, TYPE), [name; 2]);
        assert!(rows.iter().all(|row| row[ALGORITHM].starts_with(plan)), "{rows:?}");
    }
}

#[test]
fn a_product_is_right_with_every_epilogue() {
    for epilogue in ["bias", "gelu", "residual"] {
        let args = ["gemm", "--simulate", "1", "--m", "5,130", "--n", "72", "--k", "8"];
        let rows = rows_of(&[&args[..], &["--epilogue", epilogue]].concat());
        assert_eq!(column(&rows, VARIANT), ["rust"; 2]);
    }
}

#[test]
fn plans_of_a_shape_are_compared() {
    let args = ["gemm", "--simulate", "1", "--m", "5", "--n", "72", "--k", "8"];
    let rows = rows_of(&[&args[..], &["--plan", "swapped:8x64:4,portable"]].concat());
    assert_eq!(column(&rows, ALGORITHM), ["swapped:8x64:4,", "portable,"]);
    let reason = "--plan swapped:128x64:1: for 5x72x8 there are only swapped:8x64:";
    refuses_late(&[&args[..], &["--plan", "swapped:128x64:1"]].concat(), reason);
}

#[test]
fn plans_are_not_tuned_on_simulated_gpus() {
    for args in [&["tune", "gemm", "--m", "5"][..], &["tune", "all-reduce"]] {
        let mut command = program(args);
        command.env("DEVCOMM_SIMULATE", "1");
        let (code, stdout, stderr) = output(command);
        assert_eq!((code, stdout.as_str()), (Some(1), ""));
        assert!(stderr.contains("simulated GPUs have no times"), "{stderr}");
    }
}

#[test]
fn what_is_captured_to_a_graph_is_checked_too() {
    let rows = rows_of(&["put", "--simulate", "2", "-e", "8K", "-G", "1"]);
    assert_eq!(rows.len(), 2 * 4);
    let args = ["all-reduce", "--simulate", "2", "-e", "8K", "-d", "f16", "-G", "1"];
    let rows = rows_of(&args);
    assert_eq!(rows.len(), 5);
}

#[test]
fn the_environment_chooses_the_machine_as_the_flag_does() {
    let args = ["all-reduce", "-e", "8K", "-d", "f32"];
    let (by_variable, rows) = table_on("4,seed=3", &args);
    let (by_flag, same) = table(&[&args[..], &["--simulate", "4"]].concat());
    // Everything is equal but the command line.
    assert_eq!((&by_variable[1..], &rows), (&by_flag[1..], &same));
    let (comments, _) = table_on("4,seed=3", &[&args[..], &["-g", "2"]].concat());
    assert_eq!(comments[1], "# 2 simulated GPUs: results are checked, nothing is timed");
}

#[test]
fn a_size_that_is_no_multiple_of_the_element_is_rounded_down() {
    let args = ["all-reduce", "--simulate", "2", "-b", "5", "-e", "11", "-i", "1", "-d", "float"];
    let rows = rows_of(&args);
    assert_eq!(column(&rows, SIZE), [["4"; 5], ["8"; 5]].concat());
    let args = ["all-reduce", "--simulate", "2", "-b", "1", "-e", "3", "-d", "f32"];
    refuses_late(&args, "no message holds an element of 4 bytes: raise -e");
}

#[test]
fn without_checks_nothing_is_called_right() {
    let args = ["all-reduce", "--simulate", "2", "-e", "8K", "-c", "0", "-d", "half"];
    let (comments, rows) = parsed(program(&args));
    assert_eq!(column(&rows, WRONG), ["N/A"; 5]);
    assert_eq!(comments.last().unwrap(), "# results were not checked");
}

#[test]
fn csv_and_json_hold_the_rows_of_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let (csv, json) = (path(&folder, "rows.csv"), path(&folder, "rows.json"));
    let args = ["all-reduce", "--simulate", "2", "-b", "16", "-e", "16", "-d", "bf16"];
    table(&[&args[..], &["--csv", &csv, "--json", &json]].concat());

    let csv = fs::read_to_string(csv).unwrap();
    let expected = "size,count,type,redop,m,n,k,tokens,hidden,variant,in_place,blocks,threads,\
                    time_us,algbw,busbw,tflops,wrong,noise_percent,time_over_best,algorithm,asked,\
                    l2,power_w,sm_mhz,temperature_c,p99_us,spread_percent,again_us,between_us,\
                    between_noise_percent\n\
                    16,8,bf16,sum,,,,,,rust,false,1,128,,,,,0,,,,,,,,,,,,,\n\
                    16,8,bf16,sum,,,,,,rust-ops,false,1,64,,,,,0,,,Lamport,,,,,,,,,,\n\
                    16,8,bf16,sum,,,,,,rust-ops-plain,false,1,64,,,,,0,,,Lamport,,,,,,,,,,\n\
                    16,8,bf16,sum,,,,,,nccl,false,,,,,,,0,,,,,,,,,,,,,\n\
                    16,8,bf16,sum,,,,,,nccl-sym,false,,,,,,,0,,,,,,,,,,,,,\n";
    assert_eq!(csv, expected);

    let json = read_json(&json);
    let header = &json["header"];
    assert_eq!((&header["ranks"], &header["lsa_ranks"]), (&Value::from(2), &Value::from(2)));
    assert!(header["machine"].is_null(), "{header}");
    let command: Vec<&str> =
        header["command"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(command[..4], ["devcomm-bench", "all-reduce", "--simulate", "2"]);
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    assert_eq!(rows[0]["variant"], "rust");
    assert_eq!(rows[0]["type"], "bf16");
    assert_eq!(rows[0]["wrong"], 0);
    assert!(rows[0]["time_us"].is_null(), "{rows:?}");
    assert_eq!(json["is_complete"], true);
}

#[test]
fn nccl_tests_table_has_the_results_in_place() {
    let rows_of = |args: &[&str]| {
        // Values of nccl-tests' flags that change nothing.
        let same = ["-t", "1", "-m", "1", "-z", "0", "-b", "24", "-e", "24K", "-f", "32"];
        let (code, stdout, stderr) = run(&[args, &["-d", "f32"], &same].concat());
        assert_eq!(code, Some(0), "{stdout}{stderr}");
        let rows = stdout.lines().filter(|line| line.starts_with(' '));
        rows.map(|row| row.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    let row = |size, count, redop, root, wrong_in_place| {
        format!("{size} {count} float {redop} {root} N/A N/A N/A 0 N/A N/A N/A {wrong_in_place}")
    };
    for (name, parts, redop, root) in [
        ("all-reduce", 1, "sum", "-1"),
        ("all-gather", 3, "none", "-1"),
        ("reduce-scatter", 3, "sum", "-1"),
        ("broadcast", 1, "none", "0"),
    ] {
        let sizes = [24, 768, 24576].map(|size| row(size, size / 4 / parts, redop, root, "0"));
        assert_eq!(rows_of(&[name, "--simulate", "3", "--nccl-tests", "nccl"]), sizes);
        assert_eq!(rows_of(&[name, "--simulate", "2", "--nccl-tests"]).len(), 3);
    }
    let graphs = rows_of(&["all-to-all", "--simulate", "2", "--nccl-tests", "-G", "1"]);
    assert_eq!(graphs[0], row(24, 3, "none", "-1", "N/A"));
}

/// Writes a script that can be run, and returns its path.
fn write_program(path: String, script: &str) -> String {
    // Another process writes it, as a file that this one has open cannot be run.
    let write = "printf %s \"$1\" > \"$0\" && chmod +x \"$0\"";
    let written = Command::new("sh").args(["-c", write, &path, script]).status().unwrap();
    assert!(written.success());
    path
}

/// Writes a peer whose first process prints these rows, if its job has this text.
fn write_peer(path: String, job: &str, rows: &str) -> String {
    let asked = format!("case \"$*\" in *'{job}'*) ;; *) exit 1 ;; esac");
    write_program(path, &format!("#!/bin/sh\n[ $RANK = 0 ] || exit 0\n{asked}\n{rows}"))
}

/// Runs a benchmark with peers, and returns its output and the rows of its JSON.
fn rows_with_peers(args: &[&str], peers: &str) -> (String, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let json = path(&folder, "rows.json");
    let more = ["--rounds", "1", "--peers", peers, "--json", &json];
    let (code, stdout, stderr) = run(&[args, &more].concat());
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    (stdout, read_json(&json)["rows"].as_array().unwrap().clone())
}

#[test]
fn rows_of_nccl_tests_join_the_table() {
    let folder = tempfile::tempdir().unwrap();
    // The columns of operations in place, in which everything is wrong, are not read.
    let row = "64 32 half sum -1 1.00 0.00 0.00 $wrong 1.00 0.00 0.00 32";
    let script = format!("#!/bin/sh\nwrong=0; [ $2 = 1 ] || wrong=5\necho \"{row}\"\n");
    let program = write_program(path(&folder, "all_reduce_perf"), &script);
    let args = ["all-reduce", "--simulate", "2", "-b", "64", "-e", "64", "--rounds", "1"];
    let more = ["-d", "f16", "--variants", "nccl,nccl-tests-lsa,nccl-tests-lsa-vector"];
    let args = [&args[..], &more].concat();
    let peers = format!("nccl-tests={program}");
    let (code, stdout, stderr) = run(&[&args[..], &["--peers", &peers]].concat());
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    let rows = stdout.lines().filter(|line| line.trim_start().starts_with("64 "));
    let words = |row: &str| row.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let rows: Vec<(String, String)> =
        rows.map(words).map(|row| (row[VARIANT].clone(), row[WRONG].clone())).collect();
    let expected = [("nccl", "0"), ("nccl-tests-lsa", "0"), ("nccl-tests-lsa-vector", "5")];
    assert_eq!(
        rows,
        expected.map(|(variant, wrong)| (variant.to_owned(), wrong.to_owned())),
        "{stdout}"
    );
    assert!(stderr.contains("5 elements are wrong"), "{stderr}");

    refuses(&args, &["nccl-tests-lsa cannot run: --peers nccl-tests runs it"]);
    let more = ["--peers", &peers, "--variants", "nccl"];
    refuses(&[&["all-reduce", "--simulate", "2"], &more[..]].concat(), &["names none of its"]);
}

/// Returns a script of `bench/peers` as a command, with a job of all-reduces.
fn script(name: &str, counts: &Value, variant: &str) -> Command {
    let job = serde_json::json!({
        "counts": counts, "variants": [variant], "iters": 1, "warmup": 0, "check": 1, "graph": 0,
        "rounds": 1, "seed": 1,
    });
    let mut command = Command::new("python3");
    command.args(["-B", &format!("{}/peers/{name}", env!("CARGO_MANIFEST_DIR")), &job.to_string()]);
    command.envs([("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")]);
    command
}

#[test]
fn nccl_tests_end_with_the_script_that_is_killed_and_their_lines_are_progress() {
    let folder = tempfile::tempdir().unwrap();
    let body = "#!/bin/sh\necho begun\nread line\necho survived >&2\n";
    let program = write_program(path(&folder, "all_reduce_perf"), body);
    let mut python = script("nccl_tests.py", &serde_json::json!({"f32": [4]}), "nccl-tests-lsa");
    python.arg(program).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut python = python.spawn().expect("python3 starts");
    let mut line = String::new();
    BufReader::new(python.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "# begun\n");
    // `wait` would close it before the script has ended.
    let input = python.stdin.take();
    python.kill().unwrap();
    python.wait().unwrap();
    // A program that is still there would now read the end of its input.
    drop(input);
    let mut errors = String::new();
    python.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(errors, "");
}

#[test]
fn torchs_script_says_which_messages_it_leaves_out() {
    let mocked = "import runpy, sys; from unittest.mock import MagicMock; torch = MagicMock(); \
                  torch.distributed.get_rank.return_value = 0; \
                  memory = torch.distributed._symmetric_memory; \
                  memory.empty.return_value.element_size.return_value = 2; \
                  sys.modules.update({'torch': torch, 'torch.distributed': torch.distributed, \
                  'torch.distributed._symmetric_memory': memory}); sys.argv = sys.argv[1:]; \
                  runpy.run_path(sys.argv[0], run_name='__main__')";
    let counts = serde_json::json!({"f16": [4], "bf16": [3]});
    let real = script("torch_symm_mem.py", &counts, "torch-one-shot");
    let mut command = Command::new("python3");
    command.args(["-B", "-c", mocked]).args(real.get_args().skip(1)).env("LOCAL_RANK", "0");
    let (exit, stdout, stderr) = output(command);
    assert_eq!(exit, Some(0), "{stderr}");
    let rows: Vec<Value> = stdout.lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    let columns = |row: &Value| (row["type"].clone(), row["size"].clone());
    assert_eq!(
        rows.iter().map(columns).collect::<Vec<_>>(),
        [("bf16".into(), 6.into()), ("f16".into(), 8.into())]
    );
    assert!(rows.iter().all(|row| row["left_out"].is_string()), "{rows:?}");
}

/// Rows join by their shapes, as two shapes have the same size.
#[test]
fn torchs_products_join_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let row = |shape: &str, rest: &str| {
        let case = r#""variant": "torch-fused", "type": "bf16", "size": 128"#;
        format!("echo '{{{case}, \"shape\": {shape}, {rest}}}'\n")
    };
    let job = r#""collective":"reduce-scatter","shapes":[[8,8,72],[8,8,16]]"#;
    let rows = [
        row("[8, 8, 72]", r#""times_us": [1], "wrong": 0"#),
        row("[8, 8, 16]", r#""left_out": "too few terms""#),
    ];
    let python = write_peer(path(&folder, "python"), job, &rows.concat());
    let args = ["gemm-reduce-scatter", "--simulate", "2", "--m", "8", "--n", "8", "--k", "72,16"];
    let (stdout, rows) = rows_with_peers(&args, &format!("torch={python}"));
    assert!(stdout.contains("# left out: torch-fused of 128 B"), "{stdout}");
    let of_torch: Vec<_> = rows.iter().filter(|row| row["variant"] == "torch-fused").collect();
    assert_eq!(of_torch.len(), 1, "{rows:?}");
    assert_eq!(of_torch[0]["k"], 72, "{rows:?}");
}

#[test]
fn rows_of_peers_join_the_table_and_absent_ones_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let row = |algorithm: &str| {
        let case = r#""variant": "flashinfer", "type": "bf16", "size": 16, "wrong": 0"#;
        format!("echo '{{{case}, \"algorithm\": \"{algorithm}\", \"times_us\": [1]}}'\n")
    };
    let of_no_case = r#"{"variant": "vllm", "type": "bf16", "size": 48, "times_us": [1]}"#;
    let rows = [row("one-shot"), row("two-shot"), format!("echo '{of_no_case}'")].concat();
    let peer = write_peer(path(&folder, "peer"), "", &rows);
    let args = ["all-reduce", "--simulate", "2", "-b", "8", "-e", "16", "-f", "2", "-d", "bf16"];
    let (stdout, rows) = rows_with_peers(&args, &format!("flashinfer={peer},torch=/no/such"));
    assert!(stdout.contains("# #wrong 0"), "{stdout}");
    assert!(stdout.contains("# left out: torch-one-shot: cannot start /no/such"), "{stdout}");
    let text = |name: &str| rows.iter().filter_map(|row| row[name].as_str()).collect::<Vec<_>>();
    let variants = [&["rust"], &OF_OPS[..], &OF_NCCL].concat();
    assert_eq!(text("variant"), [&variants[..], &variants, &["flashinfer"; 2]].concat());
    assert_eq!(text("asked"), ["one-shot", "two-shot"]);
    assert!(
        stdout.contains("# left out: vllm of 48 B None: this run has no such case"),
        "{stdout}"
    );
    // The variants of this program need not be among those that are named.
    let args_of_peers = [&args[..], &["--variants", "flashinfer,vllm"]].concat();
    let (_, rows) = rows_with_peers(&args_of_peers, &format!("flashinfer={peer}"));
    assert_eq!(rows.len(), 2, "{rows:?}");

    let more = ["--peers", "torch=/no/such", "--variants", "nccl,torch-one-shot"];
    let cannot = "torch-one-shot cannot run: cannot start /no/such";
    refuses(&[&args[..], &more].concat(), &[cannot]);
    refuses(&["all-reduce", "--peers", "gloo"], &["no peer `gloo`, but torch, nccl-tests"]);
    refuses(&["all-reduce", "--peers", "torch", "--processes"], &["must be threads"]);
    // The peer `nccl` is this program, started once more.
    let more = ["--peers", "nccl=NCCL_SYM_CTAS=4"];
    let printed = r#"nccl: {"algorithm":"NCCL_SYM_CTAS=4","hidden":null,"#;
    let (_, _, stderr) = run(&[&args[..], &more].concat());
    assert!(stderr.contains(printed), "{stderr}");
    assert!(stderr.contains("error: nccl printed 0 times for 21 rounds"), "{stderr}");
}

/// A dispatch and a combine have the same size.
#[test]
fn rows_of_nccl_ep_join_by_their_operation() {
    let folder = tempfile::tempdir().unwrap();
    let batch = Batch::new(264, 16, 3, &[2, 2], 0).routed(Routing::Random, 0);
    // The bytes of the rows that the rank with most of them receives.
    let size = 2 * 264 * (0..2).map(|rank| batch.received(rank)).max().unwrap();
    let row = |variant: &str, operation: &str| {
        let case = format!(r#""variant": "{variant}", "type": "bf16", "size": {size}"#);
        let case = format!(r#"{case}, "tokens": 2, "hidden": 264, "operation": "{operation}""#);
        format!("echo '{{{case}, \"algorithm\": \"direct\", \"times_us\": [1], \"wrong\": 0}}'\n")
    };
    let sizes = r#""tokens":[2],"hidden":264,"experts":16,"top_k":3"#;
    let job = format!(r#"{{{sizes},"routing":"random","operations":["dispatch","combine"]}}"#);
    let rows = [row("nccl-ep-ll", "dispatch"), row("nccl-ep-ht", "combine")].concat();
    let rows = format!("echo '# dispatch'\n{rows}");
    let peers = format!("nccl-ep={}", write_peer(path(&folder, "python"), &job, &rows));
    let args = ["ep", "--simulate", "2", "--tokens", "2", "--operations", "dispatch,combine"];
    let more = ["--variants", "rust,nccl-ep-ll,nccl-ep-ht", "--seed", "0", "--rounds", "1"];
    let args = [&args[..], &more].concat();
    let (_, rows) = table(&[&args[..], &["--peers", &peers]].concat());
    assert_eq!(column(&rows, REDOP), ["dispatch", "dispatch", "combine", "combine"]);
    assert_eq!(column(&rows, VARIANT), ["rust", "nccl-ep-ll", "rust", "nccl-ep-ht"]);

    let none = write_program(path(&folder, "none"), "#!/bin/sh\necho no package >&2\nexit 1\n");
    let peers = format!("nccl-ep={none}");
    let args = ["ep", "--simulate", "2", "--tokens", "2", "--peers", &peers];
    has_comment(&table(&args).0, "# left out: nccl-ep-ll: nccl-ep's rank ");
}

#[test]
fn nccl_ep_has_the_benchmarks_routing() {
    let peers = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");
    let code = "import json, sys; sys.path[0] = sys.argv[1]; import nccl_ep; \
                print(json.dumps(nccl_ep.routing(sys.argv[2], 7, [9, 40], 48, 5)))";
    for (name, routing) in
        [("random", Routing::Random), ("skewed", Routing::Skewed), ("one", Routing::One)]
    {
        let mut command = Command::new("python3");
        command.args(["-B", "-c", code, peers, name]);
        let (exit, stdout, stderr) = output(command);
        assert_eq!(exit, Some(0), "{stderr}");
        let [ids, weights]: [Vec<Vec<Vec<f32>>>; 2] = serde_json::from_str(&stdout).unwrap();
        let batch = Batch::new(1, 48, 5, &[9, 40], 7).routed(routing, 7);
        for rank in 0..2 {
            let want: Vec<f32> = batch.ids[rank].iter().map(|id| *id as f32).collect();
            assert_eq!(ids[rank].concat(), want, "{name}");
            assert_eq!(weights[rank].concat(), batch.weights[rank], "{name}");
        }
    }
}

#[test]
fn a_file_that_cannot_be_written_is_named_before_anything_runs() {
    let args = ["all-reduce", "--simulate", "1", "-e", "8K"];
    for flag in ["--csv", "--json"] {
        let named = format!("{flag}: cannot write /no/such/rows");
        refuses(&[&args[..], &[flag, "/no/such/rows"]].concat(), &[&named]);
    }
}

#[test]
fn a_run_that_is_killed_keeps_its_rows() {
    let folder = tempfile::tempdir().unwrap();
    let (csv, json) = (path(&folder, "rows.csv"), path(&folder, "rows.json"));
    // More sizes than any run does before it is killed.
    let args = ["all-reduce", "--simulate", "2", "-b", "4", "-e", "256M", "-i", "4", "-d", "f32"];
    let mut command = program(&[&args[..], &["--csv", &csv, "--json", &json]].concat());
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    // Lines are read until the last row of the third size.
    let mut printed = Vec::new();
    for line in lines.filter(|line| line.contains("f32")).filter(|line| !line.starts_with('#')) {
        printed.push(line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        if printed.len() == 15 {
            break;
        }
    }
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success());

    let kept = read_json(&json);
    assert_eq!(kept["header"]["command"][1], "all-reduce");
    assert_eq!(kept["is_complete"], false);
    let rows = kept["rows"].as_array().unwrap();
    assert!(rows.len() >= 15 && rows.len().is_multiple_of(5), "{}", rows.len());
    for (row, printed) in rows.iter().zip(&printed) {
        assert_eq!(row["size"].to_string(), printed[SIZE]);
        assert_eq!(row["variant"].as_str(), Some(&*printed[VARIANT]));
        assert_eq!(row["wrong"], 0);
    }
    let csv = fs::read_to_string(csv).unwrap();
    assert!(csv.ends_with('\n') && csv.lines().count() > 15, "{csv}");
    let (code, stdout, stderr) = run(&["rows", &json]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("nccl-sym") && stdout.ends_with("# #wrong 0\n"), "{stdout}");
    assert!(stdout.contains("# the run did not end: these are its first rows"), "{stdout}");
}

#[test]
fn a_simulated_rank_is_not_a_launched_one() {
    refuses(&["all-reduce", "--simulate", "2", "--processes"], &["cannot be used with"]);
}
