/* What the bookkeeping of KV pages (src/kv) and the devices that hold them (src/backend) call the same, so that a table goes from one to
 * the other as it is. */
#ifndef SITS2026_KV_PAGE_H
#define SITS2026_KV_PAGE_H

#define KV_NO_PAGE (-1) /* in a block table: the page is not whole any more, what is left of it lies elsewhere; as a block's number: gone */

#endif
