use super::*;

#[test]
fn tiles_cover_the_matrix_once() {
    for (m, n) in [(1, 1), (128, 256), (129, 257), (1000, 7), (7, 5000), (3000, 2100)] {
        let tiles = Tiles { m, n };
        let mut origins: Vec<_> = (0..tiles.count()).map(|tile| tiles.origin(tile)).collect();
        origins.sort_unstable();
        let rows = (0..m).step_by(128);
        let all: Vec<_> =
            rows.flat_map(|row| (0..n).step_by(128).map(move |column| (row, column))).collect();
        assert_eq!(origins, all, "{m} x {n}");
    }
}
