//! How the blocks of a grid divide elements among themselves.

/// Divides `count` elements into `parts` parts whose lengths differ by at most one. Returns the
/// first element and the length of part `index`.
pub(crate) const fn share(count: usize, index: usize, parts: usize) -> (usize, usize) {
    let parts = if parts == 0 { 1 } else { parts };
    let (each, more) = (count / parts, count % parts);
    if index < more { (index * (each + 1), each + 1) } else { (index * each + more, each) }
}

#[cfg(test)]
mod tests {
    use super::share;

    #[test]
    fn parts_follow_each_other_and_cover_everything() {
        for parts in 1..9 {
            for count in [0, 1, 2, 7, 8, 9, 1000] {
                let mut next = 0;
                for index in 0..parts {
                    let (first, len) = share(count, index, parts);
                    assert_eq!(first, next);
                    assert!(len == count / parts || len == count / parts + 1);
                    next += len;
                }
                assert_eq!(next, count);
            }
        }
    }
}
