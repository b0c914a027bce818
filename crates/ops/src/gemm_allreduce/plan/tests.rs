//! Tests of plans of `GemmAllReduce`.

use super::*;

#[test]
fn short_products_of_few_rows_hide_little() {
    for shape in [[2, 552, 528], [1, 8192, 4096], [67, 3800, 344], [69, 9488, 304]] {
        assert!(!hides_few_rows(Extents::new(shape).unwrap()), "{shape:?}");
    }
    for shape in [[1, 8192, 14336], [3, 2680, 296], [119, 9400, 376], [16, 14680, 872]] {
        assert!(hides_few_rows(Extents::new(shape).unwrap()), "{shape:?}");
    }
}

#[test]
fn plans_are_read_as_they_are_written() {
    let swapped = ["swapped:8x64:2", "swapped:128x128:1:2x1"];
    for text in ["strips", "wide", "unfused"].into_iter().chain(swapped) {
        let plan: GemmAllReducePlan = text.parse().unwrap();
        assert_eq!(plan.to_string(), text);
    }
    // There is no kernel with tiles of 256 rows.
    for wrong in ["ring", "portable", "swapped:256x64:2", "chunked:4"] {
        let error = wrong.parse::<GemmAllReducePlan>().unwrap_err().to_string();
        assert!(error.starts_with(&format!("`{wrong}` is no plan")), "{error}");
    }
}

#[test]
fn tiles_that_no_kernel_shares_are_refused_when_they_are_set() {
    let run = |rank: &devcomm_host::Rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let product = crate::GemmAllReduce::new(comm, &stream, 64, 64)?;
        let Ok(GemmAllReducePlan::Swapped(known)) = "swapped:8x64:2".parse() else {
            return refuse("it is a plan of few rows");
        };
        product.set_plan(Some(GemmAllReducePlan::Swapped(known)))?;
        let mut tilings = [known; 4];
        tilings[0].cluster.splits = 0;
        tilings[1].cluster.across = 2;
        tilings[2].slices = 2;
        tilings[3].rows = 256;
        for plan in tilings.map(GemmAllReducePlan::Swapped) {
            let error = product.set_plan(Some(plan)).unwrap_err().to_string();
            assert!(error.contains("no kernel exchanges tiles"), "{plan}: {error}");
        }
        Ok::<_, Error>(())
    };
    devcomm_host::World::simulated(2).unwrap().run(run).unwrap();
}
